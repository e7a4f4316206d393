"""Times as people write them: local, with a zone, or so long ago; also where clocks are changed."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.tree.backup.run_times import (
    is_latest,
    looks_like_run,
    parse_span,
    run_time_text,
    time_at,
)

BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
NEW_YORK = "EST5EDT,M3.2.0,M11.1.0"
NOW = datetime(2026, 11, 28, 12, 0, tzinfo=timezone.utc).timestamp()


def utc(text: str) -> datetime:
    """Return a time in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def enter(zone: str) -> None:
    """Make a zone that of this process."""
    os.environ["TZ"] = zone
    time.tzset()


class RunTimesTests(SynchronousTestCase):
    """What each form means."""

    def setUp(self) -> None:
        before = os.environ.get("TZ")
        self.addCleanup(self.leave, before)
        enter(BERLIN)

    def leave(self, before: str | None) -> None:
        """Go back to a zone."""
        os.environ.pop("TZ", None)
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()

    def look(self, text: str, first: str, last: str, zone: str = BERLIN) -> None:
        """Look at the first and last second of a time."""
        enter(zone)
        span = parse_span(text, NOW)
        self.assertEqual((span.first, span.last), (utc(first), utc(last)), text)

    def test_local_times(self) -> None:
        """Without a zone; a shorter one is a day or a minute."""
        self.look("2026-11-22", "2026-11-21T23:00:00", "2026-11-22T22:59:59")
        self.look("2026-11-22_18:23", "2026-11-22T17:23:00", "2026-11-22T17:23:59")
        self.look("2026-11-22 18:23:31", "2026-11-22T17:23:31", "2026-11-22T17:23:31")
        self.look("2026-07-22T18:23:31", "2026-07-22T16:23:31", "2026-07-22T16:23:31")
        self.look("2026-11-22", "2026-11-22T05:00:00", "2026-11-23T04:59:59", NEW_YORK)

    def test_zones(self) -> None:
        """Are said by Z or an offset, and then the machine's does not matter."""
        for zone in (BERLIN, NEW_YORK):
            self.look("2026-11-22Z", "2026-11-22T00:00:00", "2026-11-22T23:59:59", zone)
            self.look("2026-11-22_18:23Z", "2026-11-22T18:23:00", "2026-11-22T18:23:59", zone)
            for offset in ("+00:00", "-0000", "z"):
                self.look(
                    f"2026-11-22_18:23:31{offset}",
                    "2026-11-22T18:23:31",
                    "2026-11-22T18:23:31",
                    zone,
                )
            self.look(
                "2026-11-22_18:23:31-05:30", "2026-11-22T23:53:31", "2026-11-22T23:53:31", zone
            )

    def test_ago(self) -> None:
        """A day has 24 hours."""
        self.look("3d", "2026-11-25T12:00:00", "2026-11-25T12:00:00")
        self.look("2W", "2026-11-14T12:00:00", "2026-11-14T12:00:00")
        self.look("12h", "2026-11-28T00:00:00", "2026-11-28T00:00:00")
        self.look("now", "2026-11-28T12:00:00", "2026-11-28T12:00:00")
        self.assertEqual(parse_span("999999w", NOW).last.year, 1)

    def test_days_by_name(self) -> None:
        """Are local ones."""
        self.look("yesterday", "2026-11-26T23:00:00", "2026-11-27T22:59:59")
        self.look("today", "2026-11-27T23:00:00", "2026-11-28T22:59:59")
        self.look("Yesterday", "2026-11-27T05:00:00", "2026-11-28T04:59:59", NEW_YORK)

    def test_clocks_are_set_back(self) -> None:
        """Of the two hours of one name, a start is in the first and an end in the second."""
        self.look("2026-10-25_02:30", "2026-10-25T00:30:00", "2026-10-25T01:30:59")
        self.look("2026-10-25", "2026-10-24T22:00:00", "2026-10-25T22:59:59")  # of 25 hours

    def test_clocks_are_set_forward(self) -> None:
        """A time in the hour that does not exist has a start and an end as well."""
        self.look("2026-03-29_02:30", "2026-03-29T00:30:00", "2026-03-29T01:30:59")
        self.look("2026-03-29", "2026-03-28T23:00:00", "2026-03-29T21:59:59")  # of 23 hours

    def test_no_times(self) -> None:
        """Are refused in one sentence, with examples."""
        for text in (
            *("", "latest", "3", "d", "3m", "-3d", "2026", "2026-11", "2026-11-22_18", "tomorrow"),
            *("2026-13-01", "2026-02-30", "2026-11-22_24:00", "2026-11-22_18:60", "0000-01-01"),
            *(
                "2026-11-22_18:23:31+25:00",
                "2026-11-22+01",
                "9999-12-31",
                "\u0663d",
                "2026-11-22\n1",
            ),
            *("1" * 100_000 + "d", "2026-11-22_18:23:31Z" * 10_000, "0001-01-01_00:00:00+12:00"),
        ):
            error = self.assertRaises(UsageError, parse_span, text, NOW)
            self.assertIn("is not a time; give one such as latest, 2026-11-22", str(error))
            self.assertLess(len(str(error)), 220)
        self.assertTrue(is_latest(" Latest "))

    @given(st.integers(0, 4_000_000_000), st.sampled_from([BERLIN, NEW_YORK, "UTC0"]))
    def test_what_is_printed(self, seconds: int, zone: str) -> None:
        """Means the same second on any machine, also in the hours in which clocks are changed."""
        at = datetime.fromtimestamp(seconds, timezone.utc)
        enter(zone)
        text = run_time_text(at)
        enter(NEW_YORK)
        span = parse_span(text, NOW)
        self.assertEqual((span.first, span.last), (at, at))
        self.assertEqual(time_at(f"{text}:a", 0), len(text))

    def test_how_it_is_printed(self) -> None:
        """In local time with its offset; in UTC with Z, and so if the offset has seconds."""
        at = utc("2026-11-22T18:23:31")
        self.assertEqual(run_time_text(at), "2026-11-22_19:23:31+01:00")
        self.assertEqual(run_time_text(at, timezone.utc), "2026-11-22_18:23:31Z")
        mean_time = timezone(timedelta(seconds=3208))
        self.assertEqual(run_time_text(at, mean_time), "2026-11-22_18:23:31Z")
        enter(NEW_YORK)
        self.assertEqual(run_time_text(datetime(1, 1, 1, tzinfo=timezone.utc))[:5], "0001-")

    def test_names_like_runs(self) -> None:
        """Can be told from others."""
        for name in ("x@latest", "a@b@3d", "x@2026-11-22", "x@2026-11-22_18", "x@YESTERDAY"):
            self.assertTrue(looks_like_run(name), name)
        for name in ("x", "me@work", "@latest", "x@3days", "x@latestnews", "x@2026"):
            self.assertFalse(looks_like_run(name), name)

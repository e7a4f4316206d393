"""Limits of rates by direction and time of the week."""

from __future__ import annotations

import os
import time

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.options import byte_rate
from pipegrid.flow.rate_timetable import (
    MAX_ENTRIES,
    MINUTES_A_DAY,
    MINUTES_A_WEEK,
    NO_LIMIT,
    RateLimit,
    Rates,
    RateTimetable,
    minute_of_week,
    parse_rate_limit,
)

MB = 1 << 20


def parse(text: str) -> RateLimit | None:
    """Return a limit with sizes as the command line has them."""
    return parse_rate_limit(text, byte_rate)


def at(text: str, day: int, hour: int, minute: int = 0) -> Rates:
    """Return what a timetable says; days are counted from Monday."""
    limit = parse(text)
    assert isinstance(limit, RateTimetable)
    return limit.at(day * MINUTES_A_DAY + hour * 60 + minute)


class ParserTests(SynchronousTestCase):
    """What is accepted, and what it means."""

    def test_one_rate(self) -> None:
        """One number is for both directions, as ever; two are for sending and for receiving."""
        self.assertEqual(parse("500kB"), 500_000)
        self.assertEqual(parse(" 1.5MiB/s "), 3 << 19)
        self.assertEqual(parse("1M:1M"), MB)
        self.assertEqual(parse("1M:2M"), RateTimetable((0,), (Rates(MB, 2 * MB),)))
        self.assertEqual(parse("off:100k"), RateTimetable((0,), (Rates(None, 100 << 10),)))
        self.assertEqual(parse("10M:off"), RateTimetable((0,), (Rates(10 * MB, None),)))
        for text in ("off", "OFF", "off:off", "08:00,off 19:00,off"):
            self.assertIsNone(parse(text))

    def test_a_timetable(self) -> None:
        """An entry holds until the next one, and the last of a day until the first of the next day."""
        text = "08:00,1M:2M 19:00,off"
        self.assertEqual(at(text, 0, 7, 59), NO_LIMIT)
        self.assertEqual(at(text, 0, 8), Rates(MB, 2 * MB))
        self.assertEqual(at(text, 3, 18, 59), Rates(MB, 2 * MB))
        self.assertEqual(at(text, 6, 19), NO_LIMIT)
        self.assertEqual(at(text, 6, 23, 59), NO_LIMIT)

    def test_weekdays(self) -> None:
        """By their names or three letters, in any case, and beside entries for all days."""
        text = "Mon-10:20,1M sunday-00:00,off;12:00,3M"
        self.assertEqual(at(text, 0, 10, 19), NO_LIMIT._replace(sent=3 * MB, received=3 * MB))
        self.assertEqual(at(text, 0, 10, 20), Rates(MB, MB))
        self.assertEqual(at(text, 1, 11), Rates(3 * MB, 3 * MB))
        self.assertEqual(at(text, 6, 0), NO_LIMIT)
        self.assertEqual(at("Fri-18:00,off MON-08:00,1M", 6, 12), NO_LIMIT)
        self.assertEqual(at("Fri-18:00,off MON-08:00,1M", 0, 7, 59), NO_LIMIT)
        self.assertEqual(at("Fri-18:00,off MON-08:00,1M", 4, 17, 59), Rates(MB, MB))
        self.assertEqual(at("08:00,1M 08:00,2M Tue-08:00,3M", 1, 8), Rates(3 * MB, 3 * MB))

    def test_mistakes(self) -> None:
        """Each is a sentence that names the part that is wrong."""
        for text, words in (
            ("", "'' is not a number of bytes per second"),
            ("bad", "'bad' is not a number"),
            ("1M:", "'' is not a number"),
            (":1M", "'' is not a number"),
            ("0", "'0' is not a number"),
            ("2401,666", "'2401' is not a time such as 08:00 or Mon-08:00"),
            ("24:00,1M", "'24:00' is not a time"),
            ("10:61,1M", "'10:61' is not a time"),
            ("bad-10:20,1M", "'bad-10:20' is not a time"),
            ("Mond-10:20,1M", "'Mond-10:20' is not a time"),
            ("10:20,bad", "'bad' is not a number"),
            ("08:00,1M 2M", "'2M' has no time"),
            ("08:00,1M,2M", "'1M,2M' is not a number"),
            ("08:00,1M " * (MAX_ENTRIES + 1), "at most"),
            ("1:00:00,1M", "'1:00:00' is not a time"),
        ):
            with self.assertRaises(Exception) as caught:
                parse(text)
            self.assertIn(words, getattr(caught.exception, "message", str(caught.exception)), text)

    def test_the_local_time(self) -> None:
        """It is that of the time zone, so the limit of 08:00 begins at 08:00 in summer and winter."""
        before = os.environ.get("TZ")

        def restore() -> None:
            if before is None:
                os.environ.pop("TZ", None)
            else:
                os.environ["TZ"] = before
            time.tzset()

        self.addCleanup(restore)
        os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
        time.tzset()
        gap_s = 1774746000  # 2026-03-29 01:00 UTC: from 01:59 the clock goes on to 03:00
        for utc_s, hour in ((gap_s - 60, 1), (gap_s, 3)):
            local = time.localtime(utc_s)
            self.assertEqual(minute_of_week(local) // 60, 6 * 24 + hour)
        limit = parse("02:30,1M 03:30,off")
        assert isinstance(limit, RateTimetable)
        # At 03:00 after the gap, the entry of 02:30 counts, which no clock has shown.
        self.assertEqual(limit.at(minute_of_week(time.localtime(gap_s))), Rates(MB, MB))

    def test_every_minute_has_rates(self) -> None:
        """Whatever the entries are."""
        limit = parse("Wed-12:00,1M Sat-01:00,off")
        assert isinstance(limit, RateTimetable)
        found = {limit.at(minute) for minute in range(MINUTES_A_WEEK)}
        self.assertEqual(found, {NO_LIMIT, Rates(MB, MB)})

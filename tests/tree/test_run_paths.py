"""``NAME@TIME:path``: how it is parsed, which run it means, and what is said if none fits."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta, timezone
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap, LitCap
from pipegrid.errors import UsageError
from pipegrid.tree.aliases import add_alias, read_aliases
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.run_paths import (
    RunPath,
    choose_run,
    parse_run_path,
    run_path_text,
    shell_text,
)

CAP = DirectoryCap(LitCap(b""))
NOW = datetime(2026, 11, 28, 12, 0, tzinfo=timezone.utc).timestamp()
BERLIN = timezone(timedelta(hours=1))  # in winter


def run(time: str, name: str = "home") -> BackupRun:
    """Return a run of a time."""
    return BackupRun(name, time, CAP)


RUNS = [run(f"2026-11-0{day}_10:00:00Z") for day in (1, 2, 3)]


class RunPathTests(SynchronousTestCase):
    """How paths are parsed."""

    def test_forms(self) -> None:
        """Any time that ``--at`` accepts, then a colon, then a path, which may be empty."""
        for text, name, at, names in (
            ("home@latest:", "home", "latest", ()),
            ("home@latest:/", "home", "latest", ()),
            ("home@3d:a/b", "home", "3d", ("a", "b")),
            ("home@2026-11-22:a", "home", "2026-11-22", ("a",)),
            ("home@2026-11-22:18:23", "home", "2026-11-22", ("18:23",)),
            ("home@2026-11-22_18:23:a", "home", "2026-11-22_18:23", ("a",)),
            ("home@2026-11-22_18:23:31:a", "home", "2026-11-22_18:23:31", ("a",)),
            ("home@2026-11-22_18:23:31Z:a", "home", "2026-11-22_18:23:31Z", ("a",)),
            (
                "home@2026-11-22_19:23:31+01:00:a@3d:b/",
                "home",
                "2026-11-22_19:23:31+01:00",
                ("a@3d:b",),
            ),
            ("me@work@yesterday:x", "me@work", "yesterday", ("x",)),
            ("my: documents@today:x", "my: documents", "today", ("x",)),
            ("'cafe\u0301@3d:x'", "'caf\u00e9", "3d", ("x'",)),
        ):
            found = parse_run_path(text, {})
            self.assertEqual(found, RunPath(name, at, names), text)

    def test_others(self) -> None:
        """Are paths of another kind: caps, aliases, local files."""
        for text in (
            "URI:DIR2-LIT:a@latest:b",
            "home:a",
            "home:a@3d:b",
            "./a@3d:b",
            "a@b",
            "@3d:x",
            "@",
        ):
            self.assertIsNone(parse_run_path(text, {"home": str(CAP)}), text)

    def test_mistakes(self) -> None:
        """Get one sentence."""
        for text, said in (
            ("home@latest", "a colon follows the time of a run: 'home@latest:'"),
            ("home@3d/a", "a colon follows the time of a run: 'home@3d:a'"),
            ("home@2026-11-22_18:23:31", "'home@2026-11-22_18:23:31:'"),
            (
                "home@lastest:a",
                "there is no alias 'home@lastest', and 'lastest' is not a time of a run",
            ),
            ("home@2026-1-1:a", "'2026-1-1' is not a time of a run; give one such as latest"),
            ("home@latest:a//b", "empty name"),
        ):
            error = self.assertRaises(UsageError, parse_run_path, text, {})
            self.assertIn(said, str(error))

    def test_much_text(self) -> None:
        """Takes linear time."""
        for text in ("@3d" * 200_000, "a@" * 300_000 + ":", "@" * 600_000, "a@2026-11-22" * 50_000):
            with contextlib.suppress(UsageError):
                parse_run_path(text, {})

    def test_aliases(self) -> None:
        """Of that form cannot be made; one that another program has made comes first."""
        home = Path(self.mktemp())
        (home / "private").mkdir(parents=True)
        for name in ("x@latest", "x@3d", "x@2026-11-22_18"):
            error = self.assertRaises(UsageError, add_alias, home, name, str(CAP))
            self.assertIn("it could be a run of a backup", str(error))
        add_alias(home, "me@work", str(CAP))
        with open(home / "private/aliases", "a", encoding="utf-8") as file:
            file.write(f"x@latest: {CAP}\n")
        aliases = read_aliases(home)
        self.assertIsNone(parse_run_path("x@latest:a", aliases))
        self.assertIsNone(parse_run_path("me@work:a", aliases))
        self.assertEqual(parse_run_path("y@latest:a", aliases), RunPath("y", "latest", ("a",)))

    def test_what_is_printed(self) -> None:
        """Is parsed again, and can be pasted into a shell."""
        for name in ("home", "my documents", "it's", "a:b", "me@work"):
            each = run("2026-11-22_18:23:31Z", name)
            text = run_path_text(each, BERLIN)
            path = parse_run_path(text, {})
            assert path is not None
            self.assertEqual((path.name, path.names), (name, ()))
            self.assertEqual(choose_run([each], path.name, path.at, NOW).run, each)
        self.assertEqual(shell_text(run("2026-11-22_18:23:31Z", "my d"))[:6], "'my d@")


class ChooseRunTests(SynchronousTestCase):
    """Which run is meant."""

    def test_times(self) -> None:
        """The newest, or that of a time, of the only backup or of one that is named."""
        for name, at, expected in (
            (None, None, 2),
            (None, "latest", 2),
            (None, "2026-11-02", 1),
            ("home", "2026-11-02T10:59", 0),
            ("home", "2026-11-02T11:00", 1),
            (None, "2026-11-02_10:00:00Z", 1),
            (None, "26d", 1),
            (None, "yesterday", 2),
        ):
            found = choose_run(RUNS, name, at, NOW, BERLIN)
            self.assertEqual((found.run, found.warning), (RUNS[expected], ""), (name, at))

    def test_none(self) -> None:
        """Fits: a sentence lists what there is, and not more than a few of it."""
        other = [*RUNS, run("2026-01-01_00:00:00Z", "etc")]
        many = [run(f"2026-11-01_10:00:{n:02}Z", f"n{n:02}") for n in range(60)]
        same = [run(f"2026-11-01_10:00:{n:02}Z") for n in range(60)]
        for runs, name, at, said in (
            ([], None, None, "the catalogue lists no backup"),
            (other, None, None, "there are backups of etc, home; choose one with --as"),
            (other, "var", None, "there is no backup called 'var'; the catalogue has: etc, home"),
            (many, "var", None, "n07 and 52 more"),
            (
                RUNS,
                None,
                "2026-10-01",
                "2026-11-01_11:00:00+01:00, 2026-11-02_11:00:00+01:00, 2026",
            ),
            (same, None, "2026-10-01", "10:00:07Z and 52 more"),
            (RUNS, None, "tomorrow", "'tomorrow' is not a time"),
        ):
            zone = BERLIN if len(runs) == 3 else timezone.utc
            error = self.assertRaises(UsageError, choose_run, runs, name, at, NOW, zone)
            self.assertIn(said, str(error))
            self.assertLess(len(str(error)), 400)

    def test_the_future(self) -> None:
        """Runs with a time in the future are not the latest, unless there are no others, and that is said."""
        future = run("2027-01-01_00:00:00Z")
        found = choose_run([*RUNS, future], None, None, NOW)
        self.assertEqual(found.run, RUNS[2])
        self.assertIn("1 run of 'home' with a time in the future not considered", found.warning)
        self.assertEqual(choose_run([*RUNS, future], None, "2027-02-01", NOW).run, future)
        self.assertEqual(choose_run([future], None, "latest", NOW).run, future)
        soon = run("2026-11-28_12:30:00Z")
        self.assertEqual(choose_run([*RUNS, soon], None, None, NOW).run, soon)

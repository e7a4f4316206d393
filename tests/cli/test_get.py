"""``pipegrid get``: bytes to stdout, or to a file that appears when it is whole."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.cmd_get_cat import resolve
from pipegrid.cli.output_file import OutputFile
from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, MutableCap
from pipegrid.errors import CorruptionError, NotEnoughSharesError, SinkError, UsageError
from tests.cli.support import FakeGrid, Run

DATA = bytes(range(256))
CAP = str(LitCap(DATA))
CHK = ChkCap(bytes(16), bytes(32), 3, 10, 1000)


class GetTests(SynchronousTestCase):
    """A cap in, the file out."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"

    def test_stdout_gets_the_bytes_and_nothing_else(self) -> None:
        """The file as it is, also with -v."""
        run = Run("-v", "get", CAP)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(run.raw.getvalue(), DATA)

    def test_dash_is_standard_output(self) -> None:
        """As everywhere; no file of that name appears."""
        for arguments in ((CAP, "-o", "-"), (CAP, "-f", "-o", "-")):
            run = Run("get", *arguments)
            self.assertEqual(self.successResultOf(run.finished), 0)
            self.assertEqual(run.raw.getvalue(), DATA)
        self.assertFalse(os.path.exists("-"))

    def test_caps_from_mails_and_browsers(self) -> None:
        """A cap in quotation marks, broken over lines, or in the address of a gateway's page will do."""
        for text in (
            f'"{CAP}"',
            f"{CAP[:12]}\n{CAP[12:]}",
            "http://127.0.0.1:3456/uri/" + CAP.replace(":", "%3A"),
        ):
            run = Run("get", text)
            self.assertEqual(self.successResultOf(run.finished), 0, run.stderr)
            self.assertEqual(run.raw.getvalue(), DATA)
        run = Run("get", "http://127.0.0.1:3456/statistics")
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertIn("there is no cap in this address", run.stderr)

    def test_output_appears_when_whole(self) -> None:
        """While the download runs, there is no file of that name; afterwards nothing else."""
        grid = FakeGrid(hold=True)
        run = Run("get", CAP, "-o", str(self.path), grid=grid)
        self.assertFalse(self.path.exists())
        self.assertEqual(len(os.listdir(self.directory)), 1)
        grid.held[CAP].callback(None)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(os.listdir(self.directory), ["file"])
        self.assertEqual(self.path.read_bytes(), DATA)
        self.assertEqual(run.stdout, "")

    def test_failure_and_interruption_leave_nothing(self) -> None:
        """Neither a part of the file nor the temporary file stays."""
        for end, status in ((self._fail, 4), (self._cancel, 130)):
            grid = FakeGrid(hold=True)
            run = Run("get", CAP, "-o", str(self.path), grid=grid)
            end(run)
            self.assertEqual(self.successResultOf(run.finished), status)
            self.assertEqual(os.listdir(self.directory), [])

    def test_larger_segments_can_be_allowed(self) -> None:
        """For a get, and a repair."""
        for command in ("get", "repair"):
            run = Run(command, CAP, "--max-segment", "700MiB", grid=FakeGrid(hold=True))
            self.assertEqual(run.grid.max_segment_bytes, 700 << 20)
            run.finished.cancel()
            self.successResultOf(run.finished)

    def test_what_an_interrupted_get_has_left(self) -> None:
        """It is told what is there and what is kept; other parts of that name are cleared away."""
        part = self.directory / ".file.pipegrid-part"
        part.write_bytes(b"x" * 5000)
        grid = FakeGrid(hold=True)
        run = Run("get", CAP, "-o", str(self.path), grid=grid)
        self.assertIn(".file.pipegrid-part holds 5 kB from an earlier get", run.stderr)
        run.finished.cancel()
        self.assertEqual(self.successResultOf(run.finished), 130)
        self.assertIn(f"what was fetched is kept in {os.path.realpath(part)}", run.stderr)
        self.assertEqual(os.listdir(self.directory), [part.name])

    def _fail(self, run: Run) -> None:
        run.grid.held[CAP].errback(NotEnoughSharesError("two, not three", 2, 3))

    def _cancel(self, run: Run) -> None:
        run.finished.cancel()

    def test_an_existing_file_stays(self) -> None:
        """Without --force nothing is fetched; with it the old file is there until the new one is."""
        self.path.write_bytes(b"precious")
        run = Run("get", CAP, "-o", str(self.path))
        self.assertEqual(self.successResultOf(run.finished), 1)
        self.assertIn("exists already", run.stderr)
        self.assertEqual(run.grid.seen, [])
        grid = FakeGrid(hold=True)
        run = Run("get", CAP, "-o", str(self.path), "--force", grid=grid)
        self.assertEqual(self.path.read_bytes(), b"precious")
        grid.held[CAP].callback(None)
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(self.path.read_bytes(), DATA)

    def test_ranges(self) -> None:
        """Both ends are included, as in HTTP."""
        for text, expected in (("0-0", DATA[:1]), ("10-19", DATA[10:20]), ("250-", DATA[250:])):
            run = Run("get", CAP, "--range", text)
            self.assertEqual(self.successResultOf(run.finished), 0)
            self.assertEqual(run.raw.getvalue(), expected)

    def test_a_range_outside_the_file_is_refused(self) -> None:
        """One sentence tells what there is."""
        run = Run("get", CAP, "--range", "0-256", "-o", str(self.path))
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertIn("256 bytes, 0 to 255", run.stderr)
        self.assertEqual(os.listdir(self.directory), [])

    def test_json_describes_the_download(self) -> None:
        """Damage that was worked around is in it, and is no failure."""
        damage = CorruptionError("share 1 is damaged", 1, 36, "carol")
        run = Run("--json", "get", CAP, "-o", str(self.path), grid=FakeGrid(corrupt=[damage]))
        self.assertEqual(self.successResultOf(run.finished), 0)
        self.assertEqual(
            run.objects,
            [
                {
                    "path": str(self.path),
                    "size": 256,
                    "shares_used": {"0": "alice", "2": "bob"},
                    "corrupt": [
                        {
                            "share_number": 1,
                            "offset": 36,
                            "server": "carol",
                            "problem": "share 1 is damaged",
                        }
                    ],
                }
            ],
        )
        self.assertIn("worked around", run.stderr)

    def test_json_and_the_file_do_not_mix(self) -> None:
        """--json without -o would spoil the bytes on stdout."""
        run = Run("--json", "get", CAP)
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertEqual([fields["exit_status"] for fields in run.objects], [2])

    def test_caps_of_other_kinds_get_a_sentence_each(self) -> None:
        """Status 2, and words that say what the cap is."""
        for cap, words in (
            (str(CHK.verifier()), "verifier cap"),
            (str(DirectoryCap(CHK)), "directory"),
            (str(MutableCap("SSK", "verify", bytes(16), bytes(32))), "verifier cap"),
            ("URI:CHK:short", "instead of 5"),
            (str(CHK)[:-4] + "010", "not a number"),
            (str(CHK).replace(":3:10:", ":11:10:"), "11 of 10"),
            (str(CHK).upper(), "may only hold a-z"),
            ("URI:NEW:x", "not a cap that PipeGrid knows"),
            ("hello", "'hello' is not a cap"),
            ("", "not a cap"),
        ):
            run = Run("get", cap)
            self.assertEqual((cap, self.successResultOf(run.finished)), (cap, 2))
            self.assertIn(words, run.stderr)
            self.assertEqual(run.stderr.count("\n"), 1)

    def test_a_key_is_never_repeated_in_an_error(self) -> None:
        """Errors end up in logs, and caps are secrets."""
        run = Run("get", "URX:" + "abcdefghijklmnopqrstuvwxyz")
        self.successResultOf(run.finished)
        self.assertNotIn("ijklm", run.stderr)


class RangeTests(SynchronousTestCase):
    """What a range means."""

    def test_good_ranges(self) -> None:
        """Start and length."""
        for text, expected in (
            ("0-99", (0, 100)),
            ("99-99", (99, 1)),
            ("5-", (5, 95)),
            ("-1", (99, 1)),
            ("-100", (0, 100)),
        ):
            self.assertEqual(resolve(text, 100), expected, text)

    def test_bad_ranges(self) -> None:
        """What is no range, is empty, or is outside the file."""
        for text in ("", "-", "5", "a-b", "5-4", "0-100", "100-", "-101", "-0", "1-2-3", " 1-2"):
            with self.assertRaises(UsageError, msg=text):
                resolve(text, 100)
        with self.assertRaises(UsageError):
            resolve("0-", 0)


class OutputFileTests(SynchronousTestCase):
    """A file appears whole, or not at all."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.path = self.directory / "file"

    def test_a_file_that_appeared_meanwhile_stays(self) -> None:
        """Somebody else's file of that name is not lost."""
        with self.assertRaises(SinkError), OutputFile(str(self.path)) as output:
            output.file.write(b"ours")
            self.path.write_bytes(b"theirs")
        self.assertEqual(self.path.read_bytes(), b"theirs")
        self.assertEqual(os.listdir(self.directory), ["file"])

    def test_a_link_keeps_pointing(self) -> None:
        """--force replaces what a link points to."""
        self.path.write_bytes(b"old")
        link = self.directory / "link"
        link.symlink_to("file")
        with OutputFile(str(link), force=True) as output:
            output.file.write(b"new")
        self.assertTrue(link.is_symlink())
        self.assertEqual(self.path.read_bytes(), b"new")

    def test_devices_are_written_to(self) -> None:
        """Nobody wants a file in the place of /dev/null."""
        with OutputFile(os.devnull) as output:
            output.file.write(b"x")
        self.assertFalse(os.path.isfile(os.devnull))

    def test_places_that_cannot_be(self) -> None:
        """A directory, and a directory that is missing."""
        for path in (self.directory, self.directory / "no" / "file"):
            with self.assertRaises(SinkError) as caught:
                OutputFile(str(path))
            self.assertIn(str(path), str(caught.exception))

    def test_permissions_are_those_of_any_new_file(self) -> None:
        """The user's umask decides, as for any other program."""
        mask = os.umask(0o027)
        self.addCleanup(os.umask, mask)
        with OutputFile(str(self.path)) as output:
            output.file.write(b"x")
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o640)

"""Bad input, disks and configurations on a real embedded grid: a sentence, a status, nothing lost."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet import reactor
from twisted.trial.unittest import SynchronousTestCase, TestCase

import pipegrid
from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.disk import file_system_calls as disk
from pipegrid.grid.client_creation import create_local
from pipegrid.storage import share_file
from pipegrid.storage.share_store import ShareStore
from pipegrid.transfer.put.source import FileSource
from tests.cli.support import Run

SOURCE = Path(pipegrid.__file__).resolve().parent.parent
MANY_SEGMENTS = ("--segment-size", "3000")


@attrs.frozen
class Outcome:
    """What came of a command line."""

    status: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """What was printed, without the end of the line."""
        return self.stdout.decode("utf-8", "surrogateescape").rstrip("\n")

    @property
    def object(self) -> dict[str, Any]:
        """The one JSON object that was printed."""
        fields = json.loads(self.stdout)
        assert isinstance(fields, dict)
        return fields


class GridTestCase(TestCase):
    """A fresh embedded grid of ten directories, and the real code all the way down."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp()).absolute()
        self.grid = self.directory / "grid"
        self.storage = self.grid / "storage"
        create_local(self.grid)
        self.rng = random.Random(self.id())
        self.content = self.rng.randbytes(30_000)
        self.file = self.directory / "file"
        self.file.write_bytes(self.content)

    async def run_command(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Run a command line in this process."""
        stdout, stderr = io.BytesIO(), io.StringIO()
        console = Console(io.BytesIO(stdin), stdout, stderr)
        status = await start(("-d", str(self.grid), *arguments), console, reactor)
        return Outcome(status, stdout.getvalue(), stderr.getvalue())

    async def put(self, *arguments: str) -> str:
        """Store the file and return its cap."""
        outcome = await self.run_command("put", str(self.file), *arguments)
        self.assertEqual((outcome.status, outcome.stderr), (0, ""))
        return outcome.text

    def assert_sentence(self, outcome: Outcome, status: int, *words: str) -> None:
        """The status is this one, stderr is one line with these words, stdout is empty."""
        self.assertEqual((outcome.status, outcome.stdout), (status, b""), outcome.stderr)
        self.assertEqual(outcome.stderr.count("\n"), 1, outcome.stderr)
        self.assertTrue(outcome.stderr.startswith("pipegrid: "), outcome.stderr)
        self.assertTrue(outcome.stderr[:-1].isprintable(), ascii(outcome.stderr))
        for unwanted in ("Traceback", "Error", "failed unexpectedly"):
            self.assertNotIn(unwanted, outcome.stderr)
        for word in words:
            self.assertIn(word, outcome.stderr)

    def shares(self) -> dict[int, Path]:
        """Return the visible shares of the only file on the grid, by number."""
        paths = self.storage.glob("[0-9]*/shares/[a-z2-7][a-z2-7]/*/[0-9]*")
        return {int(path.name): path for path in sorted(paths)}

    def unfinished(self) -> list[Path]:
        """Return what lies in incoming."""
        return [path for path in self.storage.glob("*/shares/incoming/**/*") if path.is_file()]

    async def assert_comes_back(self, cap: str) -> Outcome:
        """The file can be had, bit for bit."""
        outcome = await self.run_command("get", cap)
        self.assertEqual((outcome.status, outcome.stdout == self.content), (0, True), outcome)
        return outcome


class SourceTests(GridTestCase):
    """Files that cannot be stored."""

    async def test_unreadable_files(self) -> None:
        """Each is named with its reason; no share of anything is made."""
        loop = self.directory / "loop"
        loop.symlink_to(loop)
        place = os.path.relpath(self.directory / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place)
        for path, reason in (
            (self.directory / "missing", "No such file"),
            (loop, "symbolic links"),
            (self.file / "below", "Not a directory"),
            (Path(place), "No such device"),
            (self.directory / ("x" * 300), "too long"),
        ):
            outcome = await self.run_command("put", str(path))
            self.assert_sentence(outcome, 1, f"cannot read {path}: ", reason)
        outcome = await self.run_command("put", str(self.directory))
        self.assert_sentence(outcome, 1, f"'{self.directory}' is a directory; add -r")
        self.assertFalse(self.storage.exists())

    async def test_names_that_cannot_be_printed(self) -> None:
        """They are shown on one line, without what a terminal would obey; JSON has them whole."""
        for name, shown in (
            (b"new\nline", "new\\nline"),
            (b"\x1b[2J", "\\x1b[2J"),
            (b"\xff", "\\xff"),
        ):
            path = os.fsdecode(bytes(self.directory) + b"/" + name)
            self.assert_sentence(await self.run_command("put", path), 1, f"/{shown}: No such")
            outcome = await self.run_command("put", "--json", path)
            self.assertEqual(outcome.object["path"], path)
            Path(path).write_bytes(self.content)
            outcome = await self.run_command("put", "--json", path)
            self.assertEqual((outcome.status, outcome.object["path"]), (0, path))
            self.assertEqual(outcome.stdout.count(b"\n"), 1)
            outcome = await self.run_command("put", "-v", path)
            self.assertIn(f"/{shown}: 30000 bytes", outcome.stderr)

    async def test_empty_names(self) -> None:
        """A variable that is not set is a mistake, and never means the user's own grid."""
        for arguments in (
            ("put", ""),
            ("get", "URI:LIT:", "-o", ""),
            ("-d", "", "status"),
            ("--trace", "", "status"),
        ):
            outcome = await self.run_command(*arguments)
            self.assert_sentence(outcome, 2, "the name is empty")

    def change_after(self, reads: int, change: Callable[[], None]) -> None:
        """Have ``change`` called once, after so many reads of a source."""
        read_at, done = FileSource.read_at, []

        def reading(source: FileSource, offset: int, length: int) -> bytes:
            data = read_at(source, offset, length)
            done.append(offset)
            if len(done) == reads:
                change()
            return data

        self.patch(FileSource, "read_at", reading)

    async def assert_change_is_noticed(self, change: Callable[[], None], words: str) -> None:
        self.change_after(3, change)  # amid the first pass or the second, as pieces may be
        outcome = await self.run_command("put", *MANY_SEGMENTS, str(self.file))
        self.assert_sentence(outcome, 1, str(self.file), words)
        self.assertEqual(self.shares(), {}, "a share of something that no file ever was")
        self.content = self.file.read_bytes()
        await self.assert_comes_back(await self.put(*MANY_SEGMENTS))
        self.assertEqual(self.unfinished(), [])

    async def test_a_file_that_grows_while_it_is_read(self) -> None:
        """It is not stored; the next try stores it as it is then."""

        def append() -> None:
            with open(self.file, "ab") as file:
                file.write(b"more")

        await self.assert_change_is_noticed(append, "changed while it was read")

    async def test_a_file_that_shrinks_while_it_is_read(self) -> None:
        """The same."""
        await self.assert_change_is_noticed(lambda: os.truncate(self.file, 10_000), "while it was")

    async def test_a_file_that_is_rewritten_under_its_old_time(self) -> None:
        """Neither size nor modification time tell, and yet it is noticed."""

        def rewrite() -> None:
            before = os.stat(self.file)
            with open(self.file, "r+b") as file:
                file.seek(29_000)
                file.write(b"other bytes")
            os.utime(self.file, ns=(before.st_atime_ns, before.st_mtime_ns))

        await self.assert_change_is_noticed(rewrite, "changed while it was read")

    async def test_a_disk_that_fails_amid_reading(self) -> None:
        """An input error is told with its file, and leaves nothing visible."""

        def fail() -> None:
            raise_error = _raising(OSError(errno.EIO, os.strerror(errno.EIO)))
            self.patch(os, "pread", raise_error)

        self.change_after(3, fail)
        outcome = await self.run_command("put", *MANY_SEGMENTS, str(self.file))
        self.assert_sentence(outcome, 1, str(self.file), os.strerror(errno.EIO))
        self.assertEqual(self.shares(), {})


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_args: object, **_options: object) -> None:
        raise error

    return fail


class DiskTests(GridTestCase):
    """Storage directories that do not do their duty."""

    async def test_a_full_disk(self) -> None:
        """A put that does not fit is status 3 and leaves nothing visible; with room again it works."""
        undo = self.make_small(2_000_000)
        self.content = self.rng.randbytes(3_000_000)
        self.file.write_bytes(self.content)
        outcome = await self.run_command("put", str(self.file))
        self.assert_sentence(outcome, 3, "cannot store", "servers")
        self.assertLess(len(self.shares()), 3)
        self.assertEqual(self.unfinished(), [], "what a full disk cannot use")
        undo()
        await self.assert_comes_back(await self.put())

    def make_small(self, limit_bytes: int) -> Callable[[], None]:
        """Give the storage directories a disk of this size: a real one if we may, else a pretended one."""
        self.storage.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={limit_bytes}", "none", str(self.storage)]
        done = None
        if os.geteuid() == 0:
            done = subprocess.run(mount, capture_output=True, check=False, timeout=60)
        if done is not None and done.returncode == 0:
            mounted = [True]

            def unmount() -> None:
                if mounted:
                    mounted.clear()
                    subprocess.run(["umount", str(self.storage)], check=True, timeout=60)

            self.addCleanup(unmount)
            return unmount
        write_pieces, room = disk.write_pieces, [limit_bytes]

        def limited(fd: int, pieces: Any, offset: int) -> int:
            if room[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = write_pieces(fd, pieces, offset)
            room[0] -= written
            return written

        self.patch(disk, "write_pieces", limited)
        return lambda: self.patch(disk, "write_pieces", write_pieces)

    async def test_what_was_begun_and_left_is_cleared_away(self) -> None:
        """Half an hour after an upload was killed, the next command removes its remains; not before."""
        remains = self.storage / "03" / "shares" / "incoming" / "aa" / ("a" * 26) / "3"
        remains.parent.mkdir(parents=True)
        for age_s, there in ((1700, True), (1900, False)):
            remains.write_bytes(b"x" * 1000)
            os.utime(remains, (time.time() - age_s,) * 2)
            self.assertEqual((await self.run_command("status")).status, 0)
            self.assertEqual(remains.exists(), there, age_s)

    async def test_directories_that_are_no_directories(self) -> None:
        """Four of ten are too many for a happiness of seven; ``status`` says so beforehand."""
        cap = await self.put()
        for number in range(4):
            (self.storage / f"{number:02d}").rename(self.storage / f"was-{number}")
            (self.storage / f"{number:02d}").touch()
        outcome = await self.run_command("status")
        self.assertEqual(outcome.status, 3)
        self.assertEqual(outcome.text.count("unreachable"), 4)
        self.assertIn("6 of 10 servers reachable, 6 of them with space for shares", outcome.stderr)
        self.file.write_bytes(self.content[::-1])
        outcome = await self.run_command("put", str(self.file))
        self.assert_sentence(outcome, 3, "6 of the 7 servers", "Not a directory")
        outcome = await self.run_command("put", str(self.file), "--happy", "6")
        self.assertEqual(outcome.status, 0, outcome.stderr)
        self.assertEqual((await self.assert_comes_back(cap)).stderr, "")
        outcome = await self.run_command("check", cap)
        self.assertEqual((outcome.status, outcome.text[:7]), (1, "damaged"))

    async def test_directories_that_cannot_be_written(self) -> None:
        """On a disk that is mounted read-only files can be had, not stored."""
        cap = await self.put()
        read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
        for name in ("open_locked", "write_pieces", "write_all"):
            self.patch(disk, name, _raising(read_only))
        self.assertEqual((await self.assert_comes_back(cap)).stderr, "")
        again = await self.run_command("put", str(self.file))
        self.assertEqual((again.status, again.text), (0, cap), "all shares are there")
        self.file.write_bytes(self.content[::-1])
        outcome = await self.run_command("put", str(self.file))
        self.assert_sentence(outcome, 3, "0 of the 7 servers", "Read-only")

    async def test_directories_without_room(self) -> None:
        """``status`` counts those that take shares; a ``put`` names the others, and says what it needs."""
        await self.put()
        real = ShareStore.__init__

        def init(store: ShareStore, root: Path, *settings: Any, **options: Any) -> None:
            real(store, root, *settings, **options)
            if int(root.name) < 4:
                store._room._free = lambda _: 1000

        self.patch(ShareStore, "__init__", init)
        self.file.write_bytes(self.content[::-1] * 10)
        outcome = await self.run_command("put", str(self.file))
        self.assert_sentence(outcome, 3, "6 of the 7 servers", "space for 1000 bytes, but a share")
        self.patch(ShareStore, "available_bytes", lambda store, owner=0: 0)
        outcome = await self.run_command("status")
        self.assertEqual(outcome.status, 3)
        self.assertIn("10 of 10 servers reachable, 0 of them with space for shares", outcome.stderr)

    async def test_lost_directories(self) -> None:
        """With two shares left a get is status 4 and makes no file; a put brings all back."""
        cap = await self.put()
        for path in list(self.shares().values())[2:]:
            path.unlink()
        output = self.directory / "output"
        outcome = await self.run_command("get", cap, "-o", str(output))
        self.assert_sentence(outcome, 4, "found 2 good shares", "3 are needed")
        self.assertEqual(sorted(os.listdir(self.directory)), ["file", "grid"])
        outcome = await self.run_command("check", cap)
        self.assertEqual((outcome.status, outcome.text[:5]), (4, "lost:"))
        self.assertEqual(await self.put(), cap)
        self.assertEqual(len(self.shares()), 10)
        await self.assert_comes_back(cap)

    async def test_a_get_that_finds_no_room_leaves_no_file(self) -> None:
        """The disk under ``-o`` is full: status 1, no output, no temporary file."""
        outcome = await self._in_little_space(
            "get", await self.put(), "-o", str(self.directory / "output")
        )
        self.assert_sentence(outcome, 1, "cannot write", "output", "too large")
        self.assertEqual(sorted(os.listdir(self.directory)), ["file", "grid"])

    async def test_a_pipe_that_finds_no_room_to_wait_in(self) -> None:
        """What memory does not hold of a pipe is copied; if that fails, TMPDIR is the thing to change."""
        outcome = await self._in_little_space("put", "-", stdin=self.content * 3)
        self.assert_sentence(outcome, 1, "standard input", "TMPDIR")

    async def _in_little_space(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Run a command that may make no file of more than 20 kB."""
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", "-d", str(self.grid), *arguments],
            input=stdin,
            capture_output=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        )
        return Outcome(done.returncode, done.stdout, done.stderr.decode("utf-8"))


class DamageTests(GridTestCase):
    """Shares that are not what they were."""

    def flip(self, number: int, offset: int) -> None:
        """Flip a bit at an offset of the share data."""
        path = self.shares()[number]
        data = bytearray(path.read_bytes())
        data[share_file.HEADER_BYTES + offset] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    async def test_flipped_bits(self) -> None:
        """A get works around them and tells; ``check --verify`` names share, place and server."""
        cap = await self.put(*MANY_SEGMENTS)
        offsets = {0: 36 + 2500, 1: 36 + 9999, 2: 0}  # in blocks of 1000 bytes, and in the header
        for number, offset in offsets.items():
            self.flip(number, offset)
        outcome = await self.assert_comes_back(cap)
        lines = outcome.stderr.splitlines()
        self.assertTrue(lines)
        for line in lines:
            self.assertTrue(line.startswith("pipegrid: worked around damage: local-"), line)
        outcome = await self.run_command("check", cap, "--verify")
        self.assertEqual(outcome.status, 5)
        self.assertIn("7 of 10 shares good", outcome.text)
        for number, place in ((0, 36 + 2000), (1, 36 + 9000), (2, 0)):
            server = self.shares()[number].relative_to(self.storage).parts[0]
            words = f"local-{server}: share {number} is damaged at byte {place}:"
            self.assertIn(words, outcome.stderr)
        fields = (await self.run_command("check", cap, "--verify", "--json")).object
        self.assertEqual({entry["share_number"] for entry in fields["corrupt"]}, {0, 1, 2})
        output = self.directory / "output"
        fields = (await self.run_command("get", "--json", cap, "-o", str(output))).object
        self.assertEqual(output.read_bytes(), self.content)
        self.assertTrue(fields["corrupt"])

    async def test_more_damage_than_shares_can_bear(self) -> None:
        """Eight of ten damaged in the same block: status 4 for get and check, and no file."""
        cap = await self.put()
        for number in range(8):
            self.flip(number, 36 + 77)
        output = self.directory / "output"
        outcome = await self.run_command("get", cap, "-o", str(output))
        self.assertEqual((outcome.status, outcome.stdout), (4, b""))
        self.assertEqual(outcome.stderr.count("\n"), 1)
        self.assertEqual(sorted(os.listdir(self.directory)), ["file", "grid"])
        self.assertEqual((await self.run_command("check", "--verify", cap)).status, 4)

    async def test_any_bit_of_any_share(self) -> None:
        """Wherever a bit flips, the file comes back right."""
        cap = await self.put(*MANY_SEGMENTS)
        pristine = {number: path.read_bytes() for number, path in self.shares().items()}
        for _ in range(25):
            number = self.rng.randrange(10)
            data = bytearray(pristine[number])
            data[at := self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path = self.shares()[number]
            path.write_bytes(data)
            outcome = await self.run_command("get", cap)
            self.assertEqual(outcome.status, 0, (number, at, outcome.stderr))
            self.assertEqual(outcome.stdout, self.content, (number, at))
            path.write_bytes(pristine[number])

    async def test_truncated_and_foreign_containers(self) -> None:
        """Files that are cut off, empty, or no containers at all are worked around."""
        cap = await self.put()
        for number, path in self.shares().items():
            data = path.read_bytes()
            if number < 6:
                path.write_bytes(
                    (b"", data[:5], data[:500], data[:-80], b"\0" * 900, b"#!")[number]
                )
        await self.assert_comes_back(cap)
        outcome = await self.run_command("check", "--verify", "--json", cap)
        self.assertEqual(outcome.status, 5)
        named = {entry["share_number"] for entry in outcome.object["corrupt"]}
        self.assertEqual((named, outcome.object["unreachable"]), (set(range(6)), []))


class ConfigurationTests(GridTestCase):
    """A client's directory that somebody has edited, or lost parts of."""

    async def test_settings_that_make_no_sense(self) -> None:
        """Status 2, and words that say what is wrong."""
        path = self.grid / "pipegrid.cfg"
        for text, words in (
            (b"\0\xff\xfe", "pipegrid.cfg:1: it holds a zero byte"),
            (b"shares.needed = 3\n", "cannot understand"),
            (b"[client]\n[client]\n", "cannot understand"),
            (b"[client]\nshares.needed\n[local]\n", "cannot understand"),
            (b"[client]\nshares.needed = three\n[local]\n", "[client] shares.needed is 'three'"),
            (b"[client]\nshares.needed = 11\n[local]\n", "11 of 10"),
            (b"[client]\nshares.happy = 0\n[local]\n", "choose happy from 1 to 10"),
            (b"[client]\nsegment_size = -1\n[local]\n", "segment_size is '-1'"),
            (b"[local]\nservers = 0\n", "1 to 1000 servers"),
            (b"[local]\ndurability = perhaps\n", "none, batch, strict"),
            (b"[client]\n", "no servers"),
            (b"", "no servers"),
        ):
            path.write_bytes(text)
            self.assert_sentence(await self.run_command("status"), 2, words)
        path.unlink()
        self.assert_sentence(await self.run_command("status"), 2, "init", str(self.grid))

    async def test_secrets_that_are_lost(self) -> None:
        """They are named, and never made anew in silence: that would cost convergence and leases."""
        for name in ("convergence", "secret"):
            path = self.grid / "private" / name
            original = path.read_bytes()
            for text, words in (
                (b"not base32!", "base32"),
                (b"\xff\xfe", "it is UTF-16; save the file as UTF-8 text"),
                (None, "missing"),
            ):
                path.unlink()
                if text is not None:
                    path.write_bytes(text)
                outcome = await self.run_command("put", str(self.file))
                self.assert_sentence(outcome, 2, str(path), words)
                path.touch()
            path.write_bytes(original)
        (self.grid / "private" / "secret").write_text("me\n")
        outcome = await self.run_command("put", str(self.file))
        self.assert_sentence(outcome, 2, "1 bytes instead of 32")
        self.assertFalse(self.storage.exists())

    async def test_directories_that_are_none(self) -> None:
        """A grid that is not there, or is a file, is status 2."""
        for path in (self.directory / "nowhere", self.file / "below"):
            outcome = await self.run_command("-d", str(path), "status")
            self.assert_sentence(outcome, 2, "is not a grid directory")
        outcome = await self.run_command("-d", str(self.file), "status")
        self.assert_sentence(outcome, 2, "is a file")


class CommandLineTests(SynchronousTestCase):
    """What a stranger types first."""

    def test_no_arguments_get_the_help(self) -> None:
        """As it is laid out, not on one line; on stderr, with status 2, since nothing was asked for."""
        run = Run()
        self.assertEqual(self.successResultOf(run.finished), 2)
        self.assertEqual(run.stdout, "")
        for group in ("Files", "Directories", "Backups", "Maintenance", "Servers"):
            self.assertIn(f"\n{group}:\n", run.stderr)

    def test_groups_without_a_command(self) -> None:
        """One sentence, which names those that there are, and not all of the help on one line."""
        for group, names in (
            ("alias", "add, create, list or remove"),
            ("mirror", "debian, list, rpm or verify"),
        ):
            run = Run("--json", group)
            self.assertEqual(self.successResultOf(run.finished), 2)
            told = f"name one of these: {names}; see 'pipegrid {group} --help'"
            self.assertEqual(run.stderr, f"pipegrid: {told}\n")
            self.assertEqual(run.objects, [{"error": told, "exit_status": 2}])

    def test_version_on_a_full_disk(self) -> None:
        """Even ``--version`` has its sentence."""
        for option in ("--version", "--help"):
            with open("/dev/full", "wb") as full:
                done = subprocess.run(
                    [sys.executable, "-m", "pipegrid.cli", option],
                    stdout=full,
                    stderr=subprocess.PIPE,
                    env=os.environ | {"PYTHONPATH": str(SOURCE)},
                    timeout=60,
                )
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stderr.count(b"\n"), 1, done.stderr)
            self.assertIn(b"No space left", done.stderr)

"""Trees come down whole, in few round trips, and what cannot be had is named while the rest goes on."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
from collections.abc import Mapping
from io import FileIO
from random import Random
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import CapError, NotEnoughSharesError, SinkError
from pipegrid.transfer.put.put_many import MAX_FILES
from pipegrid.transfer.settings import Limits
from pipegrid.tree import local_files, small_file_writes
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.small_file_writes import WholeFile, WriteOutcome
from pipegrid.tree.tree_download import GetTreeLimits, TreeGet, TreeGetResult, bounded
from pipegrid.tree.tree_grid import Trees
from tests.descriptors import left_open, open_files
from tests.scratch import scratch_directory
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import CLIENT, GridWorld
from tests.tree.support import entry_bytes

RTT_S = 0.1
WHEN_NS = 1_600_000_000_123_456_789


def kept(mode: int = 0o644, mtime_ns: int = WHEN_NS, **more: Any) -> dict[str, Any]:
    """Return metadata as they are stored."""
    return {"pipegrid": {"mode": mode, "mtime_ns": mtime_ns, **more}}


class TreeTestCase(SynchronousTestCase):
    """Ten servers, 100 ms away, and a local directory."""

    def setUp(self) -> None:
        self.world = GridWorld(latency_s=RTT_S / 2)
        self.addCleanup(self.world.close)
        self.addCleanup(lambda: self.assertEqual(self.world.leaks(), []))
        self.client = self.world.client()
        warm_up(self.world, self.client)
        self.scratch = scratch_directory()
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)
        self.target = self.scratch / "target"
        grid: Any = self.client.grid
        self.trees = Trees(grid)
        self.problems: dict[str, Exception] = {}
        self.told: list[tuple[str, str]] = []

    # Making trees.

    def put(self, data: bytes) -> Cap:
        """Store a file."""
        return self.world.run(self.client.grid.put(data)).cap

    def packed(self, data: bytes) -> DirectoryCap:
        """Store the bytes of a directory."""
        return directory_cap(self.put(data))

    def directory(self, tree: Mapping[str, Any]) -> DirectoryCap:
        """Store a tree: names to bytes, caps or trees; a tuple has metadata as its second."""
        children = []
        for name, given in tree.items():
            metadata: dict[str, Any] = {}
            if isinstance(given, tuple):
                given, metadata = given
            if isinstance(given, bytes):
                given = self.put(given)
            elif isinstance(given, Mapping):
                given = self.directory(given)
            children.append(PackedChild(name, given, metadata))
        return self.packed(pack_immutable(children))

    # Fetching them.

    def start(self, cap: Cap, **options: Any) -> Deferred[TreeGetResult]:
        """Begin to fetch a tree."""
        self.problems.clear()
        self.told.clear()

        def problem(path: tuple[str, ...], error: Exception) -> None:
            self.problems["/".join(path)] = error

        def done(path: tuple[str, ...], how: str, size: int) -> None:
            self.told.append(("/".join(path), how))

        return self.trees.get_tree(cap, self.target, problem=problem, done=done, **options)

    def get(self, cap: Cap, **options: Any) -> TreeGetResult:
        """Fetch a tree."""
        return self.world.run(self.start(cap, **options))

    def received_bytes(self, since: int) -> int:
        """Return how much came to the client since an entry of the network's log."""
        log = list(self.world.network.log)[since:]
        return sum(sent.size_bytes for sent in log if sent.to_host == CLIENT)

    def content(self) -> dict[str, bytes | str | None]:
        """Return all that is in the target: bytes of files, texts of links, None for directories."""
        found: dict[str, bytes | str | None] = {}
        for path in sorted(self.target.rglob("*")):
            name = str(path.relative_to(self.target))
            if path.is_symlink():
                found[name] = os.readlink(path)
            else:
                found[name] = None if path.is_dir() else path.read_bytes()
        return found


class RoundTripTests(TreeTestCase):
    """What trees cost on a line where bytes take no time."""

    def test_depth_twenty(self) -> None:
        """Twenty levels with a file in each take a round trip a level, and little more."""
        random = Random(1)
        tree: dict[str, Any] = {}
        for level in range(20):
            tree = (
                {"down": tree, f"file {level}": random.randbytes(500)}
                if tree
                else {"file": random.randbytes(500)}
            )
        cap = self.directory(tree)
        self.world.clock.advance(1)
        result, took_s = self.world.timed(lambda: self.start(cap))
        self.assertEqual((result.failed, result.files, result.directories), (0, 20, 20))
        self.assertLessEqual(took_s / RTT_S, 22.0)

    def test_many_small_files(self) -> None:
        """Two hundred files in twenty directories take a round trip a level, and one for wrong guesses."""
        random = Random(2)
        cap = self.directory(
            {f"d{n}": {f"f{m}": random.randbytes(300) for m in range(10)} for n in range(20)}
        )
        self.world.clock.advance(1)
        result, took_s = self.world.timed(lambda: self.start(cap))
        self.assertEqual((result.failed, result.files), (0, 200))
        self.assertLessEqual(took_s / RTT_S, 4.1)

    def test_large_and_small_together(self) -> None:
        """A few large files do not keep the small ones waiting."""
        random = Random(3)
        tree: dict[str, Any] = {f"a{n}": random.randbytes(1_200_000) for n in range(2)}
        tree |= {f"b{n}": random.randbytes(300) for n in range(100)}
        cap = self.directory(tree)
        self.world.clock.advance(1)
        result, took_s = self.world.timed(lambda: self.start(cap))
        self.assertEqual((result.failed, result.files), (0, 102))
        self.assertLessEqual(took_s / RTT_S, 6.0)

    def test_a_directory_of_ten_thousand_entries(self) -> None:
        """It is listed in one round trip more than its bytes take."""
        lit = parse_cap("URI:LIT:ifsgc")
        cap = self.packed(
            pack_immutable(PackedChild(f"{n:05}", lit, kept()) for n in range(10_000))
        )
        self.world.clock.advance(1)
        file: Any = cap.file
        _, bytes_s = self.world.timed(lambda: self.client.grid.read(file))
        listing, took_s = self.world.timed(lambda: self.trees.list_directory(cap))
        self.assertEqual(len(listing.entries), 10_000)
        self.assertLessEqual(took_s, bytes_s + RTT_S)
        self.assertLessEqual(took_s / RTT_S, 2.5)


class RestoreTests(TreeTestCase):
    """What comes back."""

    def tree(self) -> DirectoryCap:
        """Return a tree with some of everything."""
        random = Random(4)
        self.big = random.randbytes(2_500_000)
        self.medium = random.randbytes(3000)
        return self.directory(
            {
                "big": (self.big, kept(0o600)),
                "empty": ({}, kept(0o755)),
                "sub": (
                    {
                        "medium": (self.medium, kept(0o755)),
                        "little": (b"little", kept(0o444)),
                        "link": (b"../big", kept(0o777, link="../big")),
                        "no metadata": b"x" * 100,
                    },
                    kept(0o550, WHEN_NS - 10**9),
                ),
            }
        )

    def test_everything_comes_back(self) -> None:
        """Bytes, modes, times to the nanosecond, links, empty directories."""
        result = self.get(self.tree())
        self.assertEqual(self.problems, {})
        self.assertEqual(
            self.content(),
            {
                "big": self.big,
                "empty": None,
                "sub": None,
                "sub/medium": self.medium,
                "sub/little": b"little",
                "sub/link": "../big",
                "sub/no metadata": b"x" * 100,
            },
        )
        expected = {
            "big": (0o600, WHEN_NS),
            "empty": (0o755, WHEN_NS),
            "sub": (0o550, WHEN_NS - 10**9),
            "sub/medium": (0o755, WHEN_NS),
            "sub/little": (0o444, WHEN_NS),
        }
        for name, (mode, mtime_ns) in expected.items():
            found = (self.target / name).stat()
            self.assertEqual(
                (stat.S_IMODE(found.st_mode), found.st_mtime_ns), (mode, mtime_ns), name
            )
        self.assertEqual((self.target / "sub/link").lstat().st_mtime_ns, WHEN_NS)
        self.assertEqual((result.files, result.links, result.directories), (4, 1, 3))
        self.assertEqual(result.size, len(self.big) + len(self.medium) + 106)

    def test_far_years(self) -> None:
        """Times beyond 2262 come back as well, as far as the file system has them."""
        far_ns = 13_569_465_600 * 10**9  # in 2400
        probe = self.scratch / "probe"
        probe.touch()
        os.utime(probe, ns=(far_ns, far_ns))
        cap = self.directory(
            {"f": (b"x" * 100, kept(0o600, far_ns)), "d": ({}, kept(0o700, far_ns))}
        )
        self.get(cap)
        for name in ("f", "d"):
            found = (self.target / name).stat()
            self.assertEqual(found.st_mtime_ns, probe.stat().st_mtime_ns, name)
        self.assertEqual(self.get(cap).present, 1)

    def test_a_rerun_fetches_only_directories(self) -> None:
        """What is there is not fetched again; what is missing is, and nothing else changes."""
        cap = self.tree()
        self.get(cap)
        before = self.content()
        since = len(self.world.network.log)
        result = self.get(cap)
        self.assertEqual((result.files, result.present, result.links), (0, 4, 1))
        self.assertLess(self.received_bytes(since), 60_000)
        (self.target / "sub").chmod(0o700)
        (self.target / "sub/medium").unlink()
        (self.target / "sub").chmod(0o550)
        result = self.get(cap)
        self.assertEqual((result.files, result.fetched_bytes), (1, len(self.medium)))
        self.assertEqual(self.content(), before)
        self.assertEqual((self.target / "sub").stat().st_mtime_ns, WHEN_NS - 10**9)
        self.assertEqual(stat.S_IMODE((self.target / "sub").stat().st_mode), 0o550)

    def test_killed_while_files_got_their_names(self) -> None:
        """A rerun finds them there, and takes the hidden names away that they still have."""
        cap = self.tree()
        self.get(cap)
        before = self.content()
        (self.target / "sub").chmod(0o700)
        for name in ("big", "sub/medium", "sub/little"):
            path = self.target / name
            os.link(path, path.with_name(f".{path.name}.pipegrid-part"))
        self.assertEqual(self.get(cap).present, 4)
        self.assertEqual(list(self.content()), list(before))
        self.assertTrue(self.content() == before)

    def test_modes(self) -> None:
        """What the umask allows, without set-id and sticky bits; or as it was stored; or all of it."""
        tree = {
            "f": (b"f", {"st_mode": stat.S_IFREG | 0o6766, "pipegrid": {"mode": 0o6766}}),
            "d": ({}, {"st_mode": stat.S_IFDIR | 0o3777, "pipegrid": {"mode": 0o3777}}),
        }
        cap = self.directory(tree)
        self.addCleanup(os.umask, os.umask(0o077))
        for modes, file, directory in (
            ("umask", 0o700, 0o700),
            ("stored", 0o766, 0o3777),
            ("exact", 0o6766, 0o3777),
        ):
            shutil.rmtree(self.target, True)
            for _ in range(2):  # and again, when they are there
                result = self.get(cap, modes=modes)
                self.assertEqual((result.failed, result.not_kept), (0, 0))
                found = [stat.S_IMODE((self.target / name).stat().st_mode) for name in "fd"]
                self.assertEqual(found, [file, directory], modes)

    def test_modes_of_a_file_that_claims_to_be_a_directory(self) -> None:
        """Its set-group-ID bit is not restored: only directories need it."""
        says = {"st_mode": stat.S_IFDIR | 0o2755, "pipegrid": {"mode": 0o2755}}
        self.get(self.directory({"f": (b"f", says), "g": (b"g" * 2000, says)}), modes="stored")
        for name in "fg":
            self.assertEqual(stat.S_IMODE((self.target / name).stat().st_mode), 0o755)

    def test_modes_of_part_files(self) -> None:
        """They have no set-id bits, with which an unfinished file would run as the user who fetches it."""
        self.target.mkdir()
        home = DirectoryFd(str(self.target))
        part = local_files.TreePart(home, str(self.target / "f"), False, RestoredMetadata(0o6755))
        part.write_pieces([b"x"])
        (hidden,) = self.target.iterdir()
        self.assertEqual(stat.S_IMODE(hidden.stat().st_mode), 0o755)
        part.publish()
        self.assertEqual(stat.S_IMODE((self.target / "f").stat().st_mode), 0o6755)

    def test_what_is_not_kept(self) -> None:
        """Is told, of each file, directory and link, whether it is new or there; nothing fails for it."""
        cap = self.directory({"f": (b"f" * 100, kept(0o755)), "d": ({}, kept(0o755))})
        told: dict[str, str] = {}
        self.addCleanup(os.umask, os.umask(0o077))  # no file is created with that mode

        def not_kept(path: tuple[str, ...], why: str) -> None:
            told["/".join(path)] = why

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        with patch.object(os, "utime", refuse), patch.object(os, "fchmod", refuse):
            result = self.get(cap, not_kept=not_kept, modes="stored")
        self.assertEqual((result.failed, result.not_kept, result.files), (0, 2, 1))
        self.assertEqual(told["f"].count("Operation not permitted"), 1)
        self.assertIn("its mode could not be set (the file system", told["f"])
        self.assertIn(
            "its mode could not be set (Operation not permitted), and its time", told["d"]
        )

    def test_too_many_paths(self) -> None:
        """A few directories can have any number: it ends when there are more than one has asked for."""
        tree: Any = {}
        for _ in range(12):
            below = self.directory(tree)
            tree = {"a": below, "b": below}
        with self.assertRaisesRegex(SinkError, "more than 500 paths"):
            self.get(self.directory(tree), max_paths=500)
        made = sum(len(names) for _, names, _ in os.walk(self.target))
        self.assertLessEqual(made, 500)

    def test_a_full_disk_ends_it(self) -> None:
        """At the first file that does not fit: nothing more is written, and no part is left."""
        cap = self.directory({f"f{number:03}": bytes([number]) * 100 for number in range(200)})
        tries: list[int] = []
        codes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        for code, sync in itertools.product(codes, ("never", "once")):
            self.patch(small_file_writes, "unnamed_sync", lambda fd, sync=sync: sync)
            shutil.rmtree(self.target, True)
            tries.clear()

            def full(*_: Any, **__: Any) -> int:
                tries.append(1)
                raise OSError(code, os.strerror(code))  # noqa: B023

            with patch.object(os, "pwritev", full):
                words = f"{os.strerror(code)}.*; nothing more is fetched"
                self.assertRaisesRegex(SinkError, words, self.get, cap)
            self.assertLess(len(tries), 100)
            self.assertEqual(os.listdir(self.target), [])

    def test_parts_in_a_tree(self) -> None:
        """A tree that was stored with one comes back without, and nothing fails."""
        cap = self.directory({"f": b"f" * 100, ".f.pipegrid-part": b"half", "g": b"g" * 100})
        for _ in range(2):
            result = self.get(cap)
            self.assertEqual(self.problems, {})
            self.assertEqual((result.failed, result.part_files), (0, 1))
            self.assertEqual(sorted(os.listdir(self.target)), ["f", "g"])

    def test_a_part_beside_a_complete_file(self) -> None:
        """Goes, unless somebody writes to it."""
        cap = self.directory({"f": (b"f" * 100, kept()), "g": b"g" * 100})
        self.get(cap)
        for name in "fg":
            (self.target / f".{name}.pipegrid-part").write_bytes(b"half")
        with open(self.target / ".g.pipegrid-part", "rb") as part:
            fcntl.flock(part, fcntl.LOCK_EX)
            self.assertEqual(self.get(cap).present, 2)
            self.assertEqual(sorted(os.listdir(self.target)), [".g.pipegrid-part", "f", "g"])
        self.assertEqual(self.get(cap).present, 2)
        self.assertEqual(sorted(os.listdir(self.target)), ["f", "g"])

    def test_another_process_writes_a_file(self) -> None:
        """It is waited for: then the file is there, or is fetched, and no part is left."""
        cap = self.directory({"f": (b"f" * 100, kept()), "g": (b"g" * 100, kept())})
        self.target.mkdir()
        parts = {}
        for name in "fg":
            parts[name] = FileIO(self.target / f".{name}.pipegrid-part", "wb")
            self.addCleanup(parts[name].close)
            fcntl.flock(parts[name], fcntl.LOCK_EX)
        running = self.start(cap)
        self.world.clock.advance(5)
        self.assertNoResult(running)
        parts["f"].write(b"f" * 100)
        os.utime(parts["f"].fileno(), ns=(WHEN_NS, WHEN_NS))
        os.rename(self.target / ".f.pipegrid-part", self.target / "f")
        parts["g"].close()  # as if it had been killed
        result = self.world.run(running)
        self.assertEqual((result.failed, result.present, result.files), (0, 1, 1))
        self.assertEqual(sorted(os.listdir(self.target)), ["f", "g"])

    def test_files_that_appear_in_a_new_directory(self) -> None:
        """A new directory is not searched for its files; what another process puts there is not replaced."""
        tree = {"d": {"same": (b"s" * 100, kept()), "other": b"o" * 100, "new": b"n"}}
        cap = self.directory(tree)
        running = self.start(cap)
        for _ in range(1000):
            if not (self.target / "d").exists():
                self.world.clock.advance(0.01)
        (self.target / "d/same").write_bytes(b"s" * 100)
        os.utime(self.target / "d/same", ns=(WHEN_NS, WHEN_NS))
        (self.target / "d/other").write_bytes(b"mine")
        result = self.world.run(running)
        self.assertEqual((result.failed, result.present, result.files), (1, 1, 1))
        self.assertIn("is another file already", str(self.problems["d/other"]))
        self.assertEqual((self.target / "d/other").read_bytes(), b"mine")
        self.assertEqual((self.target / "d/new").read_bytes(), b"n")

    def test_another_process_that_does_nothing(self) -> None:
        """It is not waited for any longer than a minute."""
        cap = self.directory({"f": b"f" * 100})
        self.target.mkdir()
        with open(self.target / ".f.pipegrid-part", "wb") as part:
            fcntl.flock(part, fcntl.LOCK_EX)
            self.assertEqual(self.get(cap).failed, 1)
        self.assertIn("another process is writing to", str(self.problems["f"]))

    def test_modes_of_files_that_are_there(self) -> None:
        """Come back, too; what has its mode and time is not touched, so that no backup reads it again."""
        cap = self.tree()
        self.get(cap)
        paths = [self.target / name for name in ("big", "sub/medium", "sub/little")]
        modes = [stat.S_IMODE(path.stat().st_mode) for path in paths]
        before = [path.stat().st_ctime_ns for path in paths]
        self.get(cap)
        self.assertEqual([path.stat().st_ctime_ns for path in paths], before)
        for options in ({}, {"paranoid": True}):
            for path in paths:
                path.chmod(0o777)
            self.assertEqual(self.get(cap, **options).present, 4)
            self.assertEqual([stat.S_IMODE(path.stat().st_mode) for path in paths], modes)

    def test_bits_that_run_a_program_as_its_owner(self) -> None:
        """Stay with a file that is there, and go if its permissions are others; none come from a grid."""
        path = self.scratch / "f"
        path.touch()
        for before, after in ((0o4755, 0o4755), (0o4700, 0o755)):
            path.chmod(before)
            local_files.restore_mode_and_time(
                DirectoryFd(str(path.parent)), str(path), RestoredMetadata(0o755)
            )
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), after)

    def test_a_link_in_place_of_a_file_that_is_there(self) -> None:
        """That comes after the look at the file: what it leads to keeps its mode."""
        victim = self.target / "victim"
        self.target.mkdir(exist_ok=True)
        victim.touch()
        victim.chmod(0o600)
        (self.target / "f").symlink_to(victim)
        home = DirectoryFd(str(self.target))
        local_files.restore_mode_and_time(
            home, str(self.target / "f"), RestoredMetadata(0o666, 10**18)
        )
        with home.entered() as inside:
            local_files._set_mode(inside, "f", 0o777)
        self.assertEqual(stat.S_IMODE(victim.stat().st_mode), 0o600)

    def test_a_root_that_may_not_be_written_to(self) -> None:
        """As it should be, after a run that lacked something: the next one can write what was missing."""
        cap = self.directory({"a": b"a" * 100, "b": b"b" * 100})
        root = json.dumps({"st_mode": stat.S_IFDIR | 0o555, "pipegrid": {"mode": 0o555}}).encode()
        modes = []
        write_group = small_file_writes.write_group

        def noting(files: list[WholeFile]) -> list[WriteOutcome]:
            modes.append(stat.S_IMODE(self.target.stat().st_mode))
            return write_group(files)

        self.patch(small_file_writes, "write_group", noting)
        self.get(cap, metadata_json=root)
        self.assertEqual(stat.S_IMODE(self.target.stat().st_mode), 0o555)
        (self.target / "b").unlink()
        link = self.target.with_name("link to it")
        link.symlink_to(self.target)
        self.addCleanup(link.unlink)
        modes.clear()
        self.world.run(self.trees.get_tree(cap, link, metadata_json=root))
        self.assertEqual(modes, [0o755])
        self.assertEqual(stat.S_IMODE(self.target.stat().st_mode), 0o555)
        self.target.chmod(0o500)  # that was not us
        (self.target / "b").unlink()
        modes.clear()
        self.get(cap)
        self.assertEqual((modes, stat.S_IMODE(self.target.stat().st_mode)), ([0o500], 0o500))

    def test_what_differs_is_named_unless_forced(self) -> None:
        """
        Neither another file, nor a directory or link in the way, is touched; --force replaces what it may.
        """
        cap = self.tree()
        self.get(cap)
        (self.target / "big").write_bytes(b"mine")
        (self.target / "sub").chmod(0o700)
        (self.target / "sub/medium").unlink()
        (self.target / "sub/medium").mkdir()
        (self.target / "sub/little").unlink()
        (self.target / "sub/little").symlink_to("/nowhere")
        (self.target / "sub/link").unlink()
        (self.target / "sub/link").symlink_to("elsewhere")
        (self.target / "of mine").write_bytes(b"mine, too")
        before = self.content()
        result = self.get(cap)
        self.assertEqual(self.content(), before)
        self.assertEqual(set(self.problems), {"big", "sub/medium", "sub/little", "sub/link"})
        self.assertEqual(result.failed, 4)
        for error in self.problems.values():
            self.assertIn("left as it is", str(error))
        self.get(cap, force=True)
        self.assertEqual(set(self.problems), {"sub/medium"})
        self.assertIn("is a directory already", str(self.problems["sub/medium"]))
        after = self.content()
        self.assertEqual((after["big"], after["sub/little"]), (self.big, b"little"))
        self.assertEqual((after["sub/link"], after["of mine"]), ("../big", b"mine, too"))

    def test_paranoia(self) -> None:
        """A file changed behind the back of its time is found by comparing, and only then."""
        cap = self.tree()
        self.get(cap)
        for name, length in (("big", len(self.big)), ("sub/medium", 3000), ("sub/little", 6)):
            path = self.target / name
            path.chmod(0o600)
            with path.open("r+b") as file:
                file.seek(length - 3)
                file.write(b"bad")
            os.utime(path, ns=(WHEN_NS, WHEN_NS))
        self.assertEqual(self.get(cap).present, 4)
        result = self.get(cap, paranoid=True)
        self.assertEqual(set(self.problems), {"big", "sub/medium", "sub/little"})
        self.assertEqual(result.present, 1)
        result = self.get(cap, paranoid=True, force=True)
        self.assertEqual((result.files, self.problems), (3, {}))
        since = len(self.world.network.log)
        result = self.get(cap, paranoid=True)
        self.assertEqual((result.files, result.present), (0, 4))
        self.assertLess(self.received_bytes(since), 200_000)

    def test_paranoia_about_many_small_files(self) -> None:
        """They are compared as a few are: those that are right count as present."""
        cap = self.directory({f"f{n:02}": (bytes([n]) * 3000, kept()) for n in range(30)})
        self.assertEqual(self.get(cap).files, 30)
        result = self.get(cap, paranoid=True)
        self.assertEqual((self.problems, result.files, result.present), ({}, 0, 30))

    def test_a_file_without_a_time(self) -> None:
        """One whose entry says no time is compared, and kept if it is the same."""
        data = b"x" * 5000
        cap = self.directory({"f": data})
        self.get(cap)
        os.utime(self.target / "f", ns=(1, 1))
        self.assertEqual(self.get(cap).present, 1)
        (self.target / "f").write_bytes(b"y" * 5000)
        self.get(cap)
        self.assertEqual(set(self.problems), {"f"})

    def test_the_same_directory_in_two_places(self) -> None:
        """It comes down in both."""
        same = self.directory({"f": b"f" * 100, "g": b"g"})
        self.get(self.directory({"a": same, "b": {"c": same}}))
        self.assertEqual(self.problems, {})
        self.assertEqual(len(self.content()), 3 + 4)

    def test_cut_and_rerun(self) -> None:
        """Cancelled at any moment, a rerun completes, and little is fetched twice."""
        cap = self.tree()
        since = len(self.world.network.log)
        self.get(cap)
        uncut = self.received_bytes(since)
        for at_s in (0.05, 0.12, 0.18, 0.22, 0.27, 0.32, 0.4):
            shutil.rmtree(self.target, ignore_errors=True)
            running = self.start(cap)
            running.addErrback(lambda failure: failure.trap(CancelledError))
            self.world.clock.advance(at_s)
            running.cancel()
            self.world.clock.advance(1)
            for path in self.target.rglob("medium"):
                self.assertEqual(path.read_bytes(), self.medium)
            files = [p for p in self.target.rglob("*") if p.is_file()]
            here = sum(p.stat().st_size for p in files)
            since = len(self.world.network.log)
            result = self.get(cap)
            self.assertEqual((result.failed, result.files + result.present), (0, 4))
            # A window of what had been asked for when it was cut may come twice.
            self.assertLess(self.received_bytes(since), uncut - 0.8 * here + 2_000_000, at_s)
            self.assertEqual((self.target / "big").read_bytes(), self.big)
            self.assertEqual(list(self.target.rglob(".*")), [])

    def test_a_file_is_not_a_tree(self) -> None:
        """The cap of a file is a sentence; so is a root that is lost."""
        failed = self.failureResultOf(self.start(LitCap(b"x")))
        self.assertTrue(failed.check(CapError))
        lost = self.directory({"f": b"f" * 100})
        self.lose(lost.file)
        self.assertRaises(NotEnoughSharesError, self.get, lost)

    def lose(self, cap: Any) -> None:
        """Take nearly all shares of a file away."""
        for server in self.world.servers[:8]:
            for number in server.shares(cap.storage_index):
                os.unlink(server.share_path(cap.storage_index, number))

    def test_lost_files_and_directories(self) -> None:
        """Each is named, and the rest comes down."""
        lost_file = self.put(b"lost" * 100)
        lost_directory = self.directory({"f": b"f" * 100})
        self.lose(lost_file)
        self.lose(lost_directory.file)
        cap = self.directory({"a": lost_file, "b": lost_directory, "c": {"d": b"there"}, "e": b"e"})
        result = self.get(cap)
        self.assertEqual(set(self.problems), {"a", "b"})
        self.assertEqual(self.content(), {"c": None, "c/d": b"there", "e": b"e"})
        self.assertEqual((result.failed, result.files), (2, 2))

    def test_a_disk_that_fills(self) -> None:
        """It ends with the first file that does not fit; no part is taken for a whole."""
        cap = self.tree()
        write = local_files.TreePart.write_pieces

        def full(part: Any, pieces: Any) -> None:
            if sum(map(len, pieces)) > 100_000 or part.position:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(part, pieces)

        with patch.object(local_files.TreePart, "write_pieces", full):
            self.assertRaisesRegex(SinkError, "big: No space left", self.get, cap)
        self.assertFalse((self.target / "big").exists())
        self.assertEqual(self.get(cap).failed, 0)


class HostileTreeTests(TreeTestCase):
    """Trees that somebody made to do harm."""

    def test_names(self) -> None:
        """
        Nothing is written outside of the target, whatever names say; each is told, harmless to a terminal.
        """
        lit = "URI:LIT:ifsgc"
        names = ["", ".", "..", "/etc/x", "../out", "a/b", "n" * 300, "x\0y", "\x1b[2J/"]
        data = b"".join(entry_bytes(name, lit) for name in [*names, "good", "esc\x1b[2J"])
        evil = b'{"pipegrid": {"name_quoted": "..%2Fout"}}'
        data += entry_bytes("quoted", lit, metadata=evil)
        result = self.get(self.packed(data))
        self.assertEqual(set(self.content()), {"good", "esc\x1b[2J"})
        self.assertEqual(result.failed, len(names) + 1)
        self.assertEqual(os.listdir(self.scratch), ["target"])
        for error in self.problems.values():
            self.assertTrue(str(error).isprintable(), str(error))

    def test_links_are_not_written_through(self) -> None:
        """A link of the tree, or one that stands in the target, leads no file elsewhere."""
        outside = self.scratch / "outside"
        outside.mkdir()
        (outside / "f").write_bytes(b"precious")
        self.target.mkdir()
        (self.target / "standing").symlink_to(outside)
        (self.target / "file").symlink_to(outside / "f")
        cap = self.directory(
            {
                "standing": {"f": b"evil", "g": b"evil" * 50},
                "file": b"evil",
                "a": (str(outside).encode(), kept(link=str(outside))),
            }
        )
        self.get(cap)
        self.assertEqual(set(self.problems), {"standing", "file"})
        self.assertEqual((outside / "f").read_bytes(), b"precious")
        self.assertEqual(os.listdir(outside), ["f"])
        self.get(cap, force=True)
        self.assertEqual(self.problems, {})
        self.assertEqual((outside / "f").read_bytes(), b"precious")
        self.assertEqual(os.listdir(outside), ["f"])
        self.assertTrue((self.target / "standing").is_dir())

    def test_a_link_that_comes_while_it_runs(self) -> None:
        """In the place of the target, or of a directory in it: nothing goes through it, and that is said."""
        outside = self.scratch / "outside"
        random = Random(9)
        inner = {
            "large": random.randbytes(2_500_000),
            "small": random.randbytes(200_000),
            "link": (b"x", kept(0o777, link="x")),
        }
        cap = self.directory({"d": (inner, kept(0o500)), "f": random.randbytes(500_000)})
        self.world.clock.advance(1)
        for replaced, late_s in itertools.product(("", "d"), (0.0, 0.02, 0.05)):
            shutil.rmtree(self.scratch / "moved", ignore_errors=True)
            shutil.rmtree(outside, ignore_errors=True)
            (outside / "d").mkdir(parents=True)
            running = self.start(cap)
            while not (self.target / "d").exists():
                self.world.clock.advance(0.01)
            self.world.clock.advance(late_s)
            self.assertFalse(running.called)
            place = self.target / replaced
            place.rename(self.scratch / "moved")
            place.symlink_to(outside)
            result = self.world.run(running)
            self.assertGreater(result.failed, 0)
            found = [str(path.relative_to(outside)) for path in outside.rglob("*")]
            self.assertEqual((found, result.links), (["d"], 0), (replaced, late_s))
            self.assertNotEqual(stat.S_IMODE(outside.stat().st_mode), 0o500)
            self.assertNotEqual(stat.S_IMODE((outside / "d").stat().st_mode), 0o500)
            self.assertIn("meanwhile", " ".join(map(str, self.problems.values())))
            place.unlink()
            shutil.rmtree(self.target, ignore_errors=True)

    def test_a_link_that_comes_between_look_and_step(self) -> None:
        """Whatever is made or changed goes into the directory that was looked at, by its descriptor."""
        outside, moved, place = self.scratch / "outside", self.scratch / "moved", self.target / "d"
        inner = {
            "file": b"f" * 100,
            "link": (b"x", kept(link="x")),
            "sub": ({"inner": b"i" * 100}, kept(0o500)),
        }
        cap = self.directory({"d": (inner, kept(0o750))})
        steps: list[tuple[Any, str]] = [
            (PartFile, "_open_part"),
            (PartFile, "_give_name"),
            (local_files, "open_unnamed"),
            (local_files, "give_name"),
            (os, "mkdir"),
            (os, "symlink"),
            (os, "fchmod"),
        ]
        for owner, name in steps:
            for path in (moved, self.target, outside):
                shutil.rmtree(path, ignore_errors=True)
            outside.mkdir(mode=0o700)
            original = getattr(owner, name)
            sync = "never" if owner is PartFile else "twice"
            self.patch(small_file_writes, "unnamed_sync", lambda fd, sync=sync: sync)

            def swapping(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                if place.is_dir() and not place.is_symlink():
                    place.rename(moved)
                    place.symlink_to(outside)
                    for part in moved.glob(".*"):  # as who wants it to be found there would
                        shutil.copy(part, outside / part.name)
                    self.copied = set(os.listdir(outside))
                return original(*args, **kwargs)

            with patch.object(owner, name, swapping):
                self.get(cap)
            self.assertTrue(place.is_symlink(), name)
            self.assertEqual(set(os.listdir(outside)), self.copied, name)
            self.assertEqual(stat.S_IMODE(outside.stat().st_mode), 0o700)
            self.assertTrue(self.problems or owner is os, name)
            self.assertNotEqual(name, "give_name" if "d/file" not in self.problems else "")
            place.unlink()

    def test_a_tree_in_a_directory(self) -> None:
        """Whoever says which directory that is has nothing written anywhere else."""
        cap = self.directory({"f": b"f" * 100})
        outside = self.scratch / "outside"
        outside.mkdir()
        into = DirectoryFd(str(self.scratch))
        self.target.symlink_to(outside)
        with self.assertRaisesRegex(SinkError, "is a link already"):
            self.get(cap, into=into)
        self.get(cap, into=into, force=True)
        self.assertEqual(self.content(), {"f": b"f" * 100})
        self.get(cap, into=DirectoryFd(str(self.target)))
        into = DirectoryFd(str(self.target))
        self.target.rename(self.scratch / "moved")
        for _ in range(2):
            with self.assertRaises(SinkError):  # nothing is there, or something else
                self.get(cap, into=into)
            if not self.target.exists():
                self.target.symlink_to(outside)
        self.assertEqual(list(outside.iterdir()), [])

    def test_a_link_that_comes_before_modes_and_times(self) -> None:
        """Of what was there: what has the same name elsewhere keeps its own."""
        outside, place = self.scratch / "outside", self.target / "d"
        outside.mkdir()
        (outside / "f").write_bytes(b"precious")
        (outside / "f").chmod(0o600)
        before = (outside / "f").stat()
        cap = self.directory({"d": {"f": (b"f" * 100, kept(0o644, 10**18))}})
        self.get(cap)
        (place / "f").chmod(0o640)
        set_mode = local_files._set_mode

        def swapping(*args: Any) -> None:
            place.rename(self.scratch / "moved")
            place.symlink_to(outside)
            set_mode(*args)

        with patch.object(local_files, "_set_mode", swapping):
            self.get(cap)
        self.assertTrue(place.is_symlink())
        after = (outside / "f").stat()
        self.assertEqual((after.st_mode, after.st_mtime_ns), (before.st_mode, before.st_mtime_ns))
        self.assertEqual(stat.S_IMODE((self.scratch / "moved/f").stat().st_mode), 0o644)

    def test_a_link_that_comes_before_a_look(self) -> None:
        """What a link leads to is not looked at, nor compared, in place of what was there."""
        outside, place = self.scratch / "outside", self.target / "d"
        moved = self.scratch / "moved"
        outside.mkdir()
        for name, data, other, owner, step in (
            ("small", b"s", b"another size", local_files, "standing"),
            ("small", b"s", b"x", local_files, "holds"),
            ("large", b"l" * 100, b"x" * 100, local_files.ExistingFile, "__init__"),
        ):
            cap = self.directory({"d": {name: data}})
            self.get(cap)
            (outside / name).write_bytes(other)  # who looks there finds that it is another file
            original = getattr(owner, step)

            def swapping(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                place.rename(moved)
                place.symlink_to(outside)
                return original(*args, **kwargs)

            self.problems.clear()
            with patch.object(owner, step, swapping):
                result = self.get(cap)
            self.assertEqual((result.present, result.files), (0, 0), step)
            said = str(self.problems[f"d/{name}"])
            self.assertIn("another directory has replaced", said, step)
            place.unlink()
            shutil.rmtree(moved)

    def test_directories_that_may_not_be_listed(self) -> None:
        """Who may write to one, and enter it, needs no more."""
        cap = self.directory({"d": {"f": b"f" * 100, "l": (b"x", kept(link="x"))}})
        opened = os.open

        def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECTORY and not flags & os.O_PATH:
                raise PermissionError(13, "Permission denied")
            return opened(path, flags, *args, **kwargs)

        with patch.object(os, "open", refusing):
            self.get(cap)
        self.assertEqual(self.problems, {})
        self.assertEqual(self.content(), {"d": None, "d/f": b"f" * 100, "d/l": "x"})

    def test_descriptors(self) -> None:
        """None is left open, whatever fails."""
        cap = self.directory({"d": {"f": b"f" * 100, "l": (b"x", kept(link="x"))}, "sub": {}})
        self.get(cap)
        before = open_files()
        self.get(cap)
        self.get(self.directory({"sub": b"in the way", "new": b"n" * 200}))
        with patch.object(PartFile, "_open_part", side_effect=OSError(28, "No space left")):
            self.assertRaises(SinkError, self.get, self.directory({"newer": b"n" * 300}))
        self.assertEqual(left_open(before), [])

    def test_a_target_that_goes_while_it_runs(self) -> None:
        """Nothing more is fetched for it."""
        random = Random(10)
        cap = self.directory({f"f{n}": random.randbytes(50_000) for n in range(40)})
        self.world.clock.advance(1)
        running = self.start(cap, limits=GetTreeLimits(jobs=1))
        while len(self.told) < 2:
            self.world.clock.advance(0.01)
        shutil.rmtree(self.target)
        since = len(self.world.network.log)
        result = self.world.run(running)
        self.assertEqual(result.failed, 40 - len(self.told))
        self.assertLess(self.received_bytes(since), 200_000)
        self.assertFalse(self.target.exists())

    def test_a_file_of_two_to_the_sixtieth_bytes(self) -> None:
        """It is refused before anything is fetched, and the rest comes down."""
        huge = ChkCap(b"k" * 16, b"u" * 32, 3, 10, 1 << 60)
        result = self.get(self.directory({"huge": huge, "f": b"f" * 100}))
        self.assertEqual((result.failed, result.files), (1, 1))
        self.assertIn("does not fit", str(self.problems["huge"]))

    def test_what_is_neither_file_nor_directory(self) -> None:
        """Unknown caps are named."""
        future = parse_cap("imm.lafs://from_the_future")
        result = self.get(self.directory({"future": future, "f": b"f"}))
        self.assertEqual((set(self.problems), result.files), ({"future"}, 1))

    def test_folding_file_systems(self) -> None:
        """Where names are the same that differ in case, the second is named and overwrites nothing."""
        cap = self.directory({"Readme": b"first", "README": b"second", "d": {}, "D": {"f": b"f"}})
        with patch.object(local_files, "folds_names", lambda home: True):
            self.get(cap, force=True)
        self.assertEqual(set(self.problems), {"Readme", "d"})

    def test_names_that_are_one_place(self) -> None:
        """
        Where a file has a short name beside its long one, say, no entry takes the place of another, nor do
        two directories become one; nobody could know that beforehand.
        """
        identity = local_files._identity

        def short(inside: int, name: str) -> tuple[int, int] | None:
            """Return what a file system does for which a name ends at its ``~``."""
            return identity(inside, name.partition("~")[0])

        tree = {"f": b"first", "f~1": b"second", "d": {"a": b"a"}, "d~1": {"b": b"b"}}
        cap = self.directory({**tree, "f~2": (b"x", kept(link="elsewhere"))})
        one = patch.object(local_files, "_is_one", lambda *names: True)
        with patch.object(local_files, "_identity", short), one:
            for there in ({}, {"f": b"mine"}):
                shutil.rmtree(self.target, ignore_errors=True)
                self.target.mkdir()
                for name, data in there.items():
                    (self.target / name).write_bytes(data)
                for force in (True, False):
                    self.get(cap, force=force, limits=GetTreeLimits(jobs=1))
                    self.assertEqual(set(self.problems), {"f~1", "f~2", "d~1"})
                    for path in self.problems:
                        self.assertIn("would both be", str(self.problems[path]))
                    self.assertEqual((self.target / "f").read_bytes(), b"first")

    def test_names_of_one_file(self) -> None:
        """Of hard links in the target each is replaced by what has its name."""
        self.target.mkdir()
        (self.target / "a").write_bytes(b"mine")
        os.link(self.target / "a", self.target / "b")
        self.get(self.directory({"a": b"one", "b": b"another"}), force=True)
        self.assertEqual(self.problems, {})
        self.assertEqual(self.content(), {"a": b"one", "b": b"another"})

    def test_what_is_on_its_way_is_bounded(self) -> None:
        """Of a hundred files no more are fetched at once than their bytes allow."""
        random = Random(5)
        cap = self.directory({f"f{n:03}": random.randbytes(3000) for n in range(100)})
        grid: Any = self.client.grid
        in_flight = 0
        most = 0
        read = grid.read

        def counted(cap: Any, *more: Any) -> Any:
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)

            def ended(result: Any) -> Any:
                nonlocal in_flight
                in_flight -= 1
                return result

            return read(cap, *more).addBoth(ended)

        with patch.object(grid, "read", counted):
            result = self.get(cap, limits=GetTreeLimits(in_flight_bytes=10 * 36_000))
            self.assertEqual((result.files, result.failed), (100, 0))
            self.assertLessEqual(most, 10)
            for given, allowed in (
                (Limits(jobs=4), 4),
                (Limits(memory_bytes=8 << 20), (2 << 20) // 35_000),
            ):
                shutil.rmtree(self.target)
                most = 0
                result = self.get(cap, limits=bounded(given))
                self.assertEqual((result.files, result.failed), (100, 0))
                self.assertGreaterEqual(most, allowed // 2)
                self.assertLessEqual(most, allowed)
        self.assertLess(10, MAX_FILES)

    def test_cut_off_is_not_complete(self) -> None:
        """Cancelled while the last files are on their way it fails: half a tree is no result."""
        cap = self.directory({f"f{n}": bytes([n]) * 3000 for n in range(20)})
        running = self.start(cap)
        self.world.clock.advance(RTT_S * 1.5)
        self.assertNoResult(running)
        running.cancel()
        self.world.clock.pump([RTT_S / 10] * 20)
        self.failureResultOf(running, CancelledError)
        self.assertLess(len(list(self.target.iterdir())), 20)

    def test_cut_off_by_a_callback(self) -> None:
        """The same where the function cancels it that is told of a file."""
        cap = self.directory({f"f{n}": bytes([n]) * 3000 for n in range(20)})
        running: list[Deferred[Any]] = []

        def progress(done: int, total: int) -> None:
            if len(self.told) == 3:
                running[0].cancel()

        running.append(self.start(cap, progress=progress))
        self.world.clock.pump([RTT_S / 10] * 40)
        self.failureResultOf(running[0], CancelledError)
        self.assertLess(len(list(self.target.iterdir())), 20)

    def test_a_callback_that_fails(self) -> None:
        """What any function raises that is told something, ends it, and comes out as it is."""
        lost = ChkCap(b"k" * 16, b"h" * 32, 3, 10, 3000)
        cap = self.directory({"here": b"h" * 3000, "lost": lost})

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        grid: Any = self.client.grid
        for name in ("problem", "progress", "done"):
            shutil.rmtree(self.target, ignore_errors=True)
            told: dict[str, Any] = {name: broken}
            running = self.trees.get_tree(cap, self.target, **told)
            self.world.clock.pump([0.1] * 50)
            self.failureResultOf(running, ZeroDivisionError)
        self.assertEqual(grid._running, set())

    def test_a_mistake_of_ours_is_not_hidden(self) -> None:
        """What nobody foresaw ends it, as what it is."""
        cap = self.directory({"f": b"f" * 100, "g": b"g" * 100})
        self.target.mkdir()
        grid: Any = self.client.grid
        get = TreeGet(grid, grid._workers, cap, str(self.target))

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        with patch.object(small_file_writes, "write_group", broken):
            running = Deferred.fromCoroutine(get.run())
            self.world.clock.advance(5)
        self.failureResultOf(running, ZeroDivisionError)

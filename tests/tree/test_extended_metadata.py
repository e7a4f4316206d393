"""Owners, attributes, access control lists, hard links and holes of backups, with real files."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import pwd
import shutil
import sqlite3
import stat
import struct
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SkipTest, SynchronousTestCase

from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.tree import extended_metadata, local_walk, metadata_restore, tree_download
from pipegrid.tree.backup.backup_run import BackupOptions, BackupResult, Backups
from pipegrid.tree.directory_reading import Entry, unpack
from pipegrid.tree.extended_metadata import (
    MAX_ATTRIBUTE_BYTES,
    MAX_ATTRIBUTES,
    HardLinks,
    OwnerNames,
    read_extended,
    stored_metadata,
    stored_names,
    with_owners,
)
from pipegrid.tree.file_metadata import entry_metadata
from pipegrid.tree.metadata_restore import ExtendedRestore, LinkedFiles, holes_in
from pipegrid.tree.tree_download import TreeGetResult
from pipegrid.tree.tree_upload import TreeReports
from tests.images import mount_ramfs
from tests.scratch import scratch_directory
from tests.tree.test_download import TreeTestCase, kept

DAY_S = 86400.0
ACCESS = "system.posix_acl_access"
DEFAULT = "system.posix_acl_default"
CAPABILITY = "security.capability"
PING = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
"""A capability for raw sockets, as ``setcap`` stores it."""


def access_list(user: int = 1234, group_bits: int = 4) -> bytes:
    """Return a list by which another user may read and write."""
    entries = ((1, 6, -1), (2, 6, user), (4, group_bits, -1), (16, 6, -1), (32, 4, -1))
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", kind, bits, number & 0xFFFFFFFF) for kind, bits, number in entries
    )


def attributes_of(path: Path) -> dict[str, bytes]:
    """Return all attributes of a file, directory or link."""
    names = os.listxattr(path, follow_symlinks=False)
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in names}


class StoredFormTests(SynchronousTestCase):
    """What is written of local files, and what is accepted from a grid."""

    def setUp(self) -> None:
        self.root = scratch_directory()
        self.addCleanup(shutil.rmtree, self.root, True)
        self.file = self.root / "file"
        self.file.write_bytes(b"content")

    def read(self) -> dict[str, Any]:
        """Return the stored form of the file."""
        with open(self.file, "rb") as file:
            return read_extended(file.fileno(), os.fstat(file.fileno()))

    def test_a_usual_file(self) -> None:
        """Has none, so the entry is as without."""
        self.assertEqual(self.read(), {})
        found = self.file.stat()
        self.assertEqual(entry_metadata(found, extended={}), entry_metadata(found))

    def test_attributes(self) -> None:
        """Any bytes as names and values, in the same order each time; not those of the system's policy."""
        names = {b"user.z": b"", b"user.a%": b"\0\xff", b"user.caf\xe9": b"x"}
        for name, value in names.items():
            os.setxattr(self.file, name, value)
        stored = self.read()
        self.assertEqual(
            stored,
            {"xattrs": {"user.a%25": "AP8=", "user.caf%E9": "eA==", "user.z": ""}},
        )
        parsed = stored_metadata({}, json.loads(json.dumps(stored)))
        self.assertEqual({os.fsencode(name): value for name, value in parsed.attributes}, names)
        with contextlib.suppress(OSError):
            os.setxattr(self.file, "security.ima", b"x")
        self.assertEqual(self.read(), stored)

    def test_too_many_attributes(self) -> None:
        """Are counted: the metadata of an entry stays within what readers accept."""
        values = {f"user.{n}": bytes(4000) for n in range(300)}
        with (
            patch.object(os, "listxattr", lambda at, follow_symlinks: list(values)),
            patch.object(os, "getxattr", lambda at, name, follow_symlinks: values[name]),
        ):
            stored = self.read()
        self.assertEqual(stored["xattrs_left_out"], 300 - len(stored["xattrs"]))
        self.assertEqual(len(stored["xattrs"]), MAX_ATTRIBUTE_BYTES // 4008)
        self.assertLess(len(json.dumps(stored)), 60_000)
        self.assertEqual(stored_metadata({}, stored).left_out, stored["xattrs_left_out"])

    def test_attributes_that_cannot_be_read(self) -> None:
        """Are counted, unless the file system has none, or one has just been removed."""
        for number, expected in (
            (errno.EOPNOTSUPP, {}),
            (errno.EIO, {"xattrs_left_out": 1}),
        ):
            with patch.object(os, "listxattr", side_effect=OSError(number, "no")):
                self.assertEqual(self.read(), expected)
        os.setxattr(self.file, "user.a", b"1")
        for number, expected in ((errno.ENODATA, {}), (errno.EACCES, {"xattrs_left_out": 1})):
            with patch.object(os, "getxattr", side_effect=OSError(number, "no")):
                self.assertEqual(self.read(), expected)

    def test_nonsense(self) -> None:
        """Is ignored, and counted; nothing is accepted that is larger than what is written."""
        big = base64.b64encode(bytes(MAX_ATTRIBUTE_BYTES)).decode()
        cases: list[tuple[Any, int, int]] = [
            (5, 0, 1),
            ({"user.a": "not base64!"}, 0, 1),
            ({"user.a": 5, "user.b": "AA=="}, 1, 1),
            ({"": "AA==", "a%00b": "AA==", "x" * 256: "AA==", "\ud800": "AA=="}, 0, 4),
            ({"user.a": "\u00e9"}, 0, 1),
            ({"user.a": big}, 0, 1),
            ({f"user.{n}": "" for n in range(MAX_ATTRIBUTES + 7)}, MAX_ATTRIBUTES, 7),
        ]
        for given, count, wrong in cases:
            parsed = stored_metadata({}, {"xattrs": given})
            self.assertEqual((len(parsed.attributes), parsed.left_out), (count, wrong), given)
        parsed = stored_metadata(
            {"st_uid": -1, "st_gid": True},
            {"hard_link": 5, "sparse": 1, "xattrs_left_out": "many", "xattrs": {}},
        )
        self.assertEqual(parsed, stored_metadata({}, None))
        for number in (1 << 32, (1 << 32) - 1, "5", None, 1e3):  # -1 would mean "do not change"
            self.assertIsNone(stored_metadata({"st_uid": number}, {}).user)

    def test_names_of_owners(self) -> None:
        """Of this system's users, as a table; of a run's, as far as they make sense."""
        owners = OwnerNames()
        value = {"xattrs": {ACCESS: base64.b64encode(access_list(user=1)).decode()}}
        owners.add(self.file.stat(), value)
        table, more = owners.stored()
        self.assertEqual(table["users"], {"0": "root", "1": pwd.getpwuid(1).pw_name})
        self.assertEqual((table["groups"]["0"], more), ("root", 0))
        for number in range(500):
            owners.users.add(number + 100_000)
        self.assertEqual(owners.stored()[1], 402)
        given = {"7": "alice", "x": "b", "99999999999": "c", "8": 5, "9": "", "10": "a\nb"}
        self.assertEqual(stored_names({"users": given}, "users"), {7: "alice"})
        for nonsense in (None, 5, {"users": 5}):
            self.assertEqual(stored_names(nonsense, "users"), {})

    def test_lists_with_other_numbers(self) -> None:
        """Users get those of this system; what is no list stays as it is."""
        changed = with_owners(access_list(7), lambda user: user + 1, lambda group: group)
        self.assertEqual(changed, access_list(8))
        for other in (b"", b"abc", access_list()[:-1], b"\3\0\0\0" + access_list()[4:]):
            self.assertEqual(with_owners(other, lambda user: 1, lambda group: 1), other)

    def test_hard_links(self) -> None:
        """Each name gets the identifier of the first; a file whose names were all met is forgotten."""
        links = HardLinks()
        os.link(self.file, self.root / "second")
        first = links.identifier(self.file.stat(), "file")
        self.assertEqual(links.identifier(self.file.stat(), "second"), first)
        self.assertEqual(links._open, {})
        self.assertEqual(HardLinks().identifier(self.file.stat(), "file"), first)
        self.patch(extended_metadata, "MAX_HARD_LINKS", 0)
        self.assertIsNone(links.identifier(self.file.stat(), "file"))
        self.assertEqual(links.left_out, 1)

    def test_linked_files(self) -> None:
        """The first is fetched, others wait for it; if it fails, the next takes its place."""
        linked: LinkedFiles[str] = LinkedFiles()
        a, b, c, d = "abcd"
        self.assertEqual([linked.add("k", each) for each in (a, b, c, d)], [a, None, None, None])
        self.assertEqual(linked.ended("k", b, True), [])
        self.assertEqual(linked.ended("k", a, False), [b])
        self.assertEqual(linked.ended("k", b, True), [c, d])
        self.assertEqual(linked.add("k", "e"), b)
        self.assertEqual(linked.exists("k", "f"), b)
        self.assertEqual(linked.exists("new", "x"), "x")
        self.assertFalse(linked.left_out)
        self.patch(metadata_restore, "MAX_WAITING", 0)
        self.assertEqual([linked.add("m", each) for each in "ab"], ["a", "b"])
        self.assertTrue(linked.left_out)
        self.patch(metadata_restore, "MAX_LINKED", 0)
        self.assertEqual((linked.add("n", "a"), linked.left_out), ("a", True))

    def test_holes(self) -> None:
        """Blocks of zeros, by their place in the file; at the ends also parts of blocks."""
        data = b"a" + bytes(4095) + bytes(8192) + b"b" * 10 + bytes(4096)
        cases: list[tuple[int, list[tuple[int, int, bool]]]] = [
            (
                0,
                [
                    (0, 4096, False),
                    (4096, 12288, True),
                    (12288, 16384, False),
                    (16384, 16394, True),
                ],
            ),
            (
                1,
                [
                    (0, 4095, False),
                    (4095, 12287, True),
                    (12287, 16383, False),
                    (16383, 16394, True),
                ],
            ),
        ]
        for position, expected in cases:
            parts = list(holes_in(memoryview(data), position))
            self.assertEqual(parts, expected)


class BackupAndRestoreTests(TreeTestCase):
    """Stored by ``backup``, restored as ``restore`` does it."""

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid():
            raise SkipTest("only root can change owners")
        self.source = self.scratch / "source"
        self.source.mkdir()
        self.private = self.scratch / "private"
        self.private.mkdir()
        config = self.client.grid.config
        self.client.grid.config = attrs.evolve(config, caches=(self.private,))
        self.days = 1
        self.opened: list[str] = []
        self.not_stored: list[tuple[str, str]] = []

    def write(self, path: str, content: bytes = b"some content of a file" * 10) -> Path:
        """Make a file."""
        target = self.source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return target

    def backup(self) -> BackupResult:
        """Make a run, a day after the last one."""
        now_s = time.time() + self.days * DAY_S
        self.days += 1
        self.opened.clear()
        really_open = local_walk._open_regular

        def opening(fd: int, name: str) -> Any:
            directory = os.readlink(f"/proc/self/fd/{fd}")
            path = os.path.join(directory, name)
            self.opened.append(os.path.relpath(path, os.path.realpath(self.source)))
            return really_open(fd, name)

        reports = TreeReports(
            not_stored=lambda path, kind, why: self.not_stored.append((path, kind))
        )
        backups = Backups(self.client.grid, now=lambda: now_s)
        running = backups.run(str(self.source), "home", BackupOptions(), reports)
        with patch.object(local_walk, "_open_regular", opening):
            result: BackupResult = self.world.run(Deferred.fromCoroutine(running))
        return result

    def restore(self, done: BackupResult, **options: Any) -> TreeGetResult:
        """Restore a run, and report failures."""
        run = done.run
        names = run.metadata.get("pipegrid")
        result = self.get(
            run.cap,
            metadata_json=json.dumps(run.metadata).encode(),
            modes="exact" if options.get("may_give_rights") else "stored",
            extended=ExtendedRestore(names=names, **options),
        )
        self.assertEqual((self.problems, result.not_kept), ({}, 0))
        return result

    def entries(self, done: BackupResult) -> dict[str, Entry]:
        """Return the entries of the root of a run."""
        data = self.world.run(self.client.grid.read(done.run.cap.file))
        return {each.name: each for each in unpack(done.run.cap, data).entries}

    def test_everything(self) -> None:
        """Owners and attributes of files, directories and links; a second backup of it has the same cap."""
        os.setxattr(self.write("d/f"), "user.comment", b"hello")
        os.setxattr(self.source / "d/f", ACCESS, access_list())
        os.setxattr(self.source / "d", "user.of", b"directory")
        os.setxattr(self.source / "d", DEFAULT, access_list())
        os.setxattr(self.source, "user.of", b"root")
        self.write("d/read-only").chmod(0o444)
        os.setxattr(self.source / "d/read-only", "user.a", bytes(1000))
        os.symlink("f", self.source / "d/link")
        os.setxattr(self.source / "d/link", "trusted.l", b"1", follow_symlinks=False)
        large = self.write("large", os.urandom(1_500_000))
        os.setxattr(large, CAPABILITY, PING)
        large.chmod(0o4755)
        for path in ("d/f", "d", "d/link", "large", "."):
            os.chown(self.source / path, 1234, 4321, follow_symlinks=False)
        os.setxattr(large, CAPABILITY, PING)  # which the change of the owner has removed
        large.chmod(0o4755)
        done = self.backup()
        result = self.restore(done, may_give_rights=True)
        self.assertEqual(result.not_restored.counts(), {})
        for path in ("d/f", "d/read-only", "d", "d/link", "large", "."):
            source, target = self.source / path, self.target / path
            self.assertEqual(attributes_of(target), attributes_of(source), path)
            for field in ("st_uid", "st_gid", "st_mode", "st_mtime_ns"):
                of_source, of_target = (
                    getattr(source.lstat(), field),
                    getattr(target.lstat(), field),
                )
                self.assertEqual(of_target, of_source, (path, field))
        self.source = self.target
        self.assertEqual(self.backup().run.cap, done.run.cap)
        files = [self.target / name for name in ("d/f", "d/read-only", "large")]
        changes_ns = [path.stat().st_ctime_ns for path in files]
        self.assertEqual(self.restore(done, may_give_rights=True).files, 0)
        self.assertEqual([path.stat().st_ctime_ns for path in files], changes_ns)

    def test_without_any(self) -> None:
        """A tree of usual files has the cap that ``put -r`` gives it."""
        self.write("d/f")
        self.write("g")
        cap = self.world.run(self.trees.put_tree(self.source)).cap
        self.assertEqual(self.backup().run.cap, cap)
        os.setxattr(self.source / "g", "user.a", b"1")
        self.assertNotEqual(self.backup().run.cap, cap)
        self.assertEqual(self.world.run(self.trees.put_tree(self.source)).cap, cap)

    def test_rights_are_not_given(self) -> None:
        """Without being asked for, neither capabilities nor set-user-ID; ``get -r`` restores nothing."""
        program = self.write("program")
        program.chmod(0o4755)
        for name, value in (
            (CAPABILITY, PING),
            ("trusted.t", b"1"),
            ("security.x", b"1"),
            ("user.u", b"1"),
        ):
            os.setxattr(program, name, value)
        os.chown(program, -1, 4321)
        program.chmod(0o4755)
        os.setxattr(program, CAPABILITY, PING)
        done = self.backup()
        result = self.restore(done)
        target = self.target / "program"
        self.assertEqual(attributes_of(target), {"user.u": b"1"})
        self.assertEqual(stat.S_IMODE(target.stat().st_mode), 0o755)
        self.assertEqual(result.not_restored.counts(), {"privileged attribute": 1})
        (sentence,) = result.not_restored.sentences("restored")
        self.assertIn("need may_give_rights), the first: program", sentence)
        target.unlink()
        result = self.get(done.run.cap)
        self.assertEqual((attributes_of(target), target.stat().st_gid), ({}, 0))
        self.assertEqual(result.not_restored.counts(), {})

    def test_unchanged_files(self) -> None:
        """Their attributes are known; a change of them is a change of the file."""
        os.setxattr(self.write("f"), "user.a", b"1")
        self.write("g")
        first = self.backup()
        self.assertEqual(self.opened, ["f", "g"])
        with patch.object(os, "listxattr", side_effect=AssertionError) as asked:
            asked.side_effect = lambda at, **_: [] if os.path.isdir(at) else self.fail()
            second = self.backup()
        self.assertEqual((self.opened, second.run.cap), ([], first.run.cap))
        os.setxattr(self.source / "f", "user.a", b"2")
        third = self.backup()
        self.assertEqual(self.opened, ["f"])
        self.assertEqual(
            self.entries(third)["f"].metadata["pipegrid"]["xattrs"], {"user.a": "Mg=="}
        )
        self.restore(third)
        self.assertEqual(attributes_of(self.target / "f"), {"user.a": b"2"})
        os.setxattr(self.source / "f", "user.a", b"3")
        self.restore(self.backup())  # into the same place: the content has not changed
        self.assertEqual(attributes_of(self.target / "f"), {"user.a": b"3"})
        os.chown(self.source / "f", 1234, -1)
        self.restore(self.backup())
        self.assertEqual((self.target / "f").stat().st_uid, 1234)

    def test_a_database_of_an_earlier_version(self) -> None:
        """Knows no attributes: they are read once, and no content is."""
        os.setxattr(self.write("f"), "user.a", b"1")
        self.backup()
        (path,) = self.private.rglob("*.sqlite")
        with sqlite3.connect(path) as database:
            database.execute("ALTER TABLE files DROP COLUMN extended")
            database.execute("PRAGMA user_version=1")
        database.close()
        done = self.backup()
        self.assertEqual((self.opened, done.counts.sent_files), (["f"], 0))
        self.assertEqual(done.counts.unchanged_bytes, (self.source / "f").stat().st_size)
        self.assertIn("xattrs", self.entries(done)["f"].metadata["pipegrid"])
        self.assertEqual(self.backup().run.cap, done.run.cap)
        self.assertEqual(self.opened, [])

    def test_what_is_too_large(self) -> None:
        """Is reported by each backup and by the restore; the rest of the file is stored."""
        os.setxattr(self.write("f"), "user.a", b"1")
        self.patch(extended_metadata, "MAX_ATTRIBUTE_BYTES", 8)
        os.setxattr(self.source / "f", "user.b", b"22")
        for _ in range(2):
            done = self.backup()
            self.assertEqual(self.not_stored, [("f", "extended attribute")])
            self.not_stored.clear()
        result = self.restore(done)
        self.assertEqual(attributes_of(self.target / "f"), {"user.a": b"1"})
        self.assertEqual(result.not_restored.counts(), {"extended attribute": 1})

    def test_owners_by_name(self) -> None:
        """A user of the same name gets the files, in lists, too; or of the same number; or nobody else."""
        path = self.write("f")
        os.setxattr(path, ACCESS, access_list(user=1))
        os.chown(path, 1, 4321)
        done = self.backup()
        daemon = pwd.getpwuid(1).pw_name
        self.assertEqual(done.run.metadata["pipegrid"]["users"]["1"], daemon)
        really = pwd.getpwnam

        def other(name: str) -> Any:
            return pwd.struct_passwd((*really(name)[:2], 777, *really(name)[3:]))

        for owners, expected in (("names", 777), ("numbers", 1), ("none", 0)):
            with patch.object(pwd, "getpwnam", other):
                self.restore(done, owners=owners)
            found = self.target / "f"
            self.assertEqual(found.stat().st_uid, expected, owners)
            listed = 777 if owners == "names" else 1
            self.assertEqual(attributes_of(found)[ACCESS], access_list(listed))
            found.unlink()

    def test_set_id_bits_without_their_owner(self) -> None:
        """Are not restored: the program would run as the user who restores."""
        for name, size in (("a", 10), ("b", 2 << 20)):
            program = self.source / name
            program.write_bytes(b"x" * size)
            os.chown(program, 1234, 4321)
            program.chmod(0o6755)
        done = self.backup()

        def forbid(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        for _ in range(2):
            with patch.object(os, "chown", forbid):
                result = self.restore(done, may_give_rights=True)
            modes = [stat.S_IMODE((self.target / name).stat().st_mode) for name in "ab"]
            self.assertEqual(modes, [0o755, 0o755])
            self.assertEqual(result.not_restored.counts(), {"owner": 2, "set-id bit": 2})
        self.restore(done, may_give_rights=True)
        modes = [stat.S_IMODE((self.target / name).stat().st_mode) for name in "ab"]
        self.assertEqual(modes, [0o6755, 0o6755])

    def test_the_lists_of_an_existing_target(self) -> None:
        """Stay: they say who may use it, and a restore into it, as of one file, does not change that."""
        self.write("f")
        done = self.backup()
        self.target.mkdir(exist_ok=True)
        for name in (ACCESS, DEFAULT):
            os.setxattr(self.target, name, access_list())
        self.restore(done)
        self.assertEqual(set(attributes_of(self.target)), {ACCESS, DEFAULT})
        self.assertEqual(attributes_of(self.target / "f"), {})

    def test_a_file_system_without(self) -> None:
        """One line for each kind, with its number; everything else is there."""
        for name in "ab":
            os.setxattr(self.write(name), "user.a", b"1")
            os.setxattr(self.source / name, ACCESS, access_list())
            os.chown(self.source / name, 1234, 4321)
            (self.source / name).chmod(0o664)  # the group itself may only read
        done = self.backup()

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        def forbid(*_: Any, **__: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        with patch.object(os, "setxattr", refuse), patch.object(os, "chown", forbid):
            result = self.restore(done)
        counts = {"owner": 2, "extended attribute": 2, "access control list": 2}
        self.assertEqual((result.not_restored.counts(), result.files), (counts, 2))
        self.assertEqual(
            result.not_restored.sentences("restored")[0],
            "owners of 2 entries not restored (this user may not set them), the first: a",
        )
        for _ in range(2):
            modes = [stat.S_IMODE((self.target / name).stat().st_mode) for name in "ab"]
            self.assertEqual(modes, [0o644, 0o644])
            with patch.object(os, "setxattr", refuse), patch.object(os, "chown", forbid):
                self.assertEqual(self.restore(done).not_restored.counts(), counts)
        self.assertEqual(self.restore(done).not_restored.counts(), {})
        self.assertEqual(attributes_of(self.target / "a")[ACCESS], access_list())

    def test_a_real_file_system_without(self) -> None:
        """It has owners and hard links: those come back, and the rest is reported."""
        os.setxattr(self.write("a"), "user.a", b"1")
        os.setxattr(self.source / "a", ACCESS, access_list())
        os.chown(self.source / "a", 1234, 4321)
        os.link(self.source / "a", self.source / "b")
        done = self.backup()
        mount_ramfs(self, self.target)
        result = self.restore(done)
        counts = {"extended attribute": 1, "access control list": 1}
        self.assertEqual(result.not_restored.counts(), counts)
        self.assertIn("the file system has none", str(result.not_restored.sentences("restored")))
        self.assertEqual((self.inodes("a", "b"), (self.target / "a").stat().st_uid), (1, 1234))

    def test_inherited_lists(self) -> None:
        """A directory in place gives new files its list: they get what was stored, so none."""
        self.write("d/f")
        done = self.backup()
        (self.target / "d").mkdir(parents=True)
        os.setxattr(self.target / "d", DEFAULT, access_list())
        self.restore(done)
        self.assertEqual(attributes_of(self.target / "d/f"), {})
        self.assertIn(DEFAULT, attributes_of(self.target / "d"))  # the user's own

    # Hard links.

    def inodes(self, *names: str) -> int:
        """Return how many files these names are in the target."""
        return len({(self.target / name).stat().st_ino for name in names})

    def test_hard_links(self) -> None:
        """Small and large files are restored as one with all names, each fetched once."""
        for name, size in (("small", 500), ("large", 1_500_000), ("tiny", 5)):
            path = self.write(f"a/{name}", os.urandom(size))
            (self.source / "b/c").mkdir(parents=True, exist_ok=True)
            os.link(path, self.source / f"b/c/{name}")
            os.link(path, self.source / f"z-{name}")
        self.write("alone")
        done = self.backup()
        result = self.restore(done)
        self.assertEqual((result.not_restored.counts(), result.files), ({}, 10))
        for name in ("small", "large", "tiny"):
            self.assertEqual(self.inodes(f"a/{name}", f"b/c/{name}", f"z-{name}"), 1, name)
            restored = (self.target / f"b/c/{name}").read_bytes()
            self.assertEqual(restored, (self.source / f"a/{name}").read_bytes())
        self.assertEqual(list(self.target.rglob(".*")), [])
        self.source = self.target
        self.assertEqual(self.backup().run.cap, done.run.cap)

    def test_hard_links_of_a_second_restore(self) -> None:
        """A name that was removed becomes a link again; a copy in its place is reported."""
        path = self.write("a")
        for name in "bc":
            os.link(path, self.source / name)
        done = self.backup()
        self.restore(done)
        for name in "bc":
            (self.target / name).unlink()
            self.assertEqual(self.restore(done).not_restored.counts(), {})
            self.assertEqual(self.inodes("a", "b", "c"), 1)
        copy = self.target / "b"
        copy.unlink()
        copy.write_bytes((self.target / "a").read_bytes())
        os.utime(copy, ns=(1, path.stat().st_mtime_ns))
        result = self.restore(done)
        self.assertEqual(result.not_restored.counts(), {"hard link": 1})
        path.write_bytes(b"other content for all names")
        changed = self.backup()
        result = self.get(changed.run.cap, extended=ExtendedRestore(), force=True)
        self.assertEqual(self.inodes("a", "b", "c"), 1)
        self.assertEqual((self.target / "c").read_bytes(), b"other content for all names")
        self.assertEqual(list(self.target.rglob(".*")), [])

    def test_no_links_possible(self) -> None:
        """Then they are files with the same content, and counted."""
        path = self.write("a")
        os.link(path, self.source / "b")
        done = self.backup()
        really = os.link

        def link(source: Any, target: Any, **options: Any) -> None:
            if not str(source).startswith("."):  # a part file gets its name so
                raise OSError(errno.EPERM, "Operation not permitted")
            really(source, target, **options)

        with patch.object(os, "link", link):
            result = self.restore(done)
        self.assertEqual(result.not_restored.counts(), {"hard link": 1})
        self.assertEqual((self.inodes("a", "b"), result.files), (2, 2))
        self.assertEqual(list(self.target.rglob(".*")), [])

    def test_lying_trees(self) -> None:
        """Names of files that differ, of foreign files, or of nothing, become no links."""
        secret = self.scratch / "secret"
        secret.write_bytes(b"secret!")
        same: dict[str, Any] = {"hard_link": "0" * 16}
        tree = {
            "a": (b"x" * 100, kept(0o644, **same)),
            "b": (b"y" * 100, kept(0o644, **same)),  # another content
            "c": (b"x" * 100, kept(0o600, **same)),  # another mode
            "d": (b"x" * 100, {"st_uid": 7, **kept(0o644, **same)}),  # another owner
            "link": (b"secret", kept(0o777, link=str(secret), **same)),
        }
        result = self.get(self.directory(tree), extended=ExtendedRestore(), modes="stored")
        self.assertEqual((result.failed, self.inodes("a", "b", "c", "d")), (0, 4))
        self.assertEqual(secret.stat().st_nlink, 1)
        self.assertEqual((self.target / "b").read_bytes(), b"y" * 100)

    def test_a_first_name_that_was_replaced(self) -> None:
        """By a link, or another file, while others waited: they are fetched, and link to nothing foreign."""
        secret = self.scratch / "secret"
        secret.write_bytes(b"x" * 100)
        os.utime(secret, ns=(5, 5))
        same: dict[str, Any] = {"hard_link": "0" * 16}
        cap = self.directory({name: (b"x" * 100, kept(0o644, **same)) for name in "ab"})
        really = metadata_restore.link_file

        def replaced(first: Any, *rest: Any) -> bool:
            place = Path(first[1])
            place.unlink()
            place.symlink_to(secret)
            return really(first, *rest)

        self.patch(tree_download, "link_file", replaced)
        result = self.get(cap, extended=ExtendedRestore())
        self.assertEqual(result.not_restored.counts(), {"hard link": 1})
        self.assertEqual(secret.stat().st_nlink, 1)
        self.assertFalse((self.target / "b").is_symlink())
        self.assertEqual((self.target / "b").read_bytes(), b"x" * 100)

    def test_a_first_name_that_is_lost(self) -> None:
        """A directory has its place, say: the next one is fetched, and the others are linked to that."""
        same: dict[str, Any] = {"hard_link": "0" * 16}
        data = os.urandom(1000)
        cap = self.directory({name: (data, kept(0o644, **same)) for name in "abc"})
        (self.target / "a").mkdir(parents=True)
        result = self.get(cap, extended=ExtendedRestore())
        self.assertEqual(list(self.problems), ["a"])
        self.assertEqual((self.inodes("b", "c"), result.failed), (1, 1))

    # Holes.

    def test_sparse_files(self) -> None:
        """Have the same bytes, and about as few blocks."""
        for name, size in (("small", 800_000), ("large", 6_000_000)):
            with open(self.source / name, "wb") as file:
                file.write(b"begin")
                file.seek(size // 2)
                file.write(b"middle")
                file.truncate(size)
        self.write("dense", bytes(300_000))
        done = self.backup()
        self.assertEqual(self.entries(done)["small"].metadata["pipegrid"]["sparse"], True)
        self.assertNotIn("sparse", self.entries(done)["dense"].metadata["pipegrid"])
        self.restore(done)
        for name in ("small", "large", "dense"):
            source, target = self.source / name, self.target / name
            self.assertEqual(target.read_bytes(), source.read_bytes(), name)
            self.assertLessEqual(target.stat().st_blocks, source.stat().st_blocks + 16, name)
        self.assertGreater((self.target / "dense").stat().st_blocks * 512, 299_999)

    def test_a_part_of_a_sparse_file(self) -> None:
        """What an interrupted restore, or another file, has left in it is overwritten."""
        with open(self.source / "large", "wb") as file:
            file.truncate(3_000_000)
        done = self.backup()
        self.target.mkdir()
        (self.target / ".large.pipegrid-part").write_bytes(os.urandom(2_500_000))
        self.restore(done)
        self.assertEqual((self.target / "large").read_bytes(), bytes(3_000_000))


class OthersReadTests(TreeTestCase):
    """What other readers make of such entries."""

    def test_unknown_keys_are_kept(self) -> None:
        """A directory with them parses as any other, and ``get -r`` takes it."""
        metadata = {"pipegrid": {"mode": 0o644, "xattrs": {"user.a": "AA=="}, "sparse": True}}
        child = PackedChild("f", self.put(b"f" * 100), metadata)
        cap = directory_cap(self.put(pack_immutable([child])))
        self.assertEqual(self.get(cap).files, 1)
        self.assertEqual((self.target / "f").read_bytes(), b"f" * 100)

"""Names over SFTP: directories, renames, attributes, and paths that lead nowhere."""

from __future__ import annotations

import stat
import struct
from typing import Any

from pipegrid.core.caps import LitCap, UnknownCap
from pipegrid.core.mutable.directory_content_edits import Edit, Link, SetMetadata
from pipegrid.gateway.sftp.sftp_messages import (
    Fields,
    FileAttributes,
    OpenFlag,
    RequestKind,
    Status,
    packed_string,
)
from pipegrid.tree import directory_reading, directory_views
from pipegrid.tree.directory import Directory
from tests.gateway.sftp_world import NEW, READ, WRITE, SftpTestCase


class ListingTests(SftpTestCase):
    """What is in a directory."""

    def test_a_thousand_entries(self) -> None:
        """They take two answers, and one round trip of the grid more than their bytes."""
        links = [Link(f"file number {n:05}.txt", LitCap(b"x" * (n % 50))) for n in range(1000)]
        directory = Directory(self.grid, self.root)
        self.world.run(directory.change(links))
        client = self.elsewhere()
        began_s = self.world.clock.seconds()
        data = self.world.run(self.grid.read(self.root.file))
        bytes_s = self.world.clock.seconds() - began_s
        began_s = self.world.clock.seconds()
        found = client.list()
        took_s = self.world.clock.seconds() - began_s
        self.assertEqual((len(found), client.pages), (1000, 2))
        self.assertEqual(found["file number 00031.txt"].size, 31)
        self.assertGreater(len(data), 100_000)
        self.assertLess(took_s, bytes_s + 2 * 0.01 + 0.01)

    def test_ten_thousand_entries(self) -> None:
        """Each once, in pages below the bound of clients; one that is added meanwhile does no harm."""
        links = [Link(f"{n:05}", LitCap(b"")) for n in range(10_000)]
        self.world.run(Directory(self.grid, self.root).change(links))
        client = self.another()
        found = client.list()
        self.assertEqual(len(found), 10_000)
        self.assertLess(max(client.channel.sizes), 128 << 10)
        self.assertLess(client.pages, 15)
        handle = Fields(client.path(RequestKind.OPENDIR, "/")).string(100)
        client.do(RequestKind.READDIR, packed_string(handle))
        client.put("/00000a", b"")
        client.path(RequestKind.REMOVE, "/09999")
        count = 0
        while True:
            answer = client.answer(client.ask(RequestKind.READDIR, packed_string(handle)))
            if answer.kind != 104:
                break
            count += Fields(answer.fields).uint32()
        self.assertLess(count, 9999)

    def test_names_that_no_path_has(self) -> None:
        """They are left out: a client would take them for something else. Others are shown."""
        names = ["", ".", "..", "a/b", "../x", "n\0ul", "fine", "new\nline", "ü" * 100]
        packed: Any = [Link(name or "x", LitCap(b"")) for name in names]
        self.world.run(Directory(self.grid, self.root).change(packed))
        self.assertEqual(set(self.another().list()), {"fine", "new\nline", "ü" * 100, "x"})

    def test_unknown_caps(self) -> None:
        """They are shown, and cannot be opened."""
        link = Link("u", UnknownCap("ro.URI:LATER:x"))
        self.world.run(Directory(self.grid, self.root).change([link]))
        client = self.another()
        self.assertEqual(stat.S_IMODE(client.list()["u"].mode or 0), 0)
        self.fails(Status.FAILURE, "does not know", client.open, "/u")

    def test_freshness(self) -> None:
        """What another client has changed is seen by a listing at once, and by all after some seconds."""
        self.client.put("/a", b"1")
        self.assertEqual(list(self.client.list()), ["a"])
        self.elsewhere().put("/b", b"2")
        self.world.clock.advance(1)
        self.assertEqual(list(self.client.list()), ["a", "b"])
        self.elsewhere().put("/c", b"3")
        self.world.clock.advance(directory_views.FRESH_S + 0.1)
        self.assertEqual(self.client.stat("/c").size, 1)

    def test_what_was_read_before_is_not_parsed_again(self) -> None:
        """When a large directory is read again, its new entries alone take time."""
        links = [Link(f"{n:04}", LitCap(b"")) for n in range(1000)]
        self.world.run(Directory(self.grid, self.root).change(links))
        self.assertEqual(len(self.client.list()), 1000)
        parsed: list[bytes] = []
        parse = directory_reading._entry

        def counted(stored: bytes, *rest: Any) -> Any:
            parsed.append(stored)
            return parse(stored, *rest)

        self.patch(directory_reading, "_entry", counted)
        for n in range(3):
            self.client.put(f"/new {n}", b"x")
        self.client.path(RequestKind.REMOVE, "/0000")
        self.world.clock.advance(directory_views.FRESH_S + 0.1)
        self.assertEqual(len(self.client.list()), 1000 + 3 - 1)
        self.assertEqual(len(parsed), 3)

    def test_memory_is_bounded(self) -> None:
        """Of the directories that were read the latest stay."""
        self.patch(directory_views, "KEPT_BYTES", 10_000)
        for number in range(30):
            self.client.mkdir(f"/{number}")
            self.client.put(f"/{number}/f", b"x")
            self.client.list(f"/{number}")
        self.assertLess(len(self.views._views), 10)
        self.assertEqual(len(self.client.list()), 30)


class NamesTests(SftpTestCase):
    """Directories are made, moved and removed."""

    def test_directories(self) -> None:
        """One that is not empty stays; errors say what is wrong."""
        client = self.client
        client.mkdir("/d")
        client.mkdir("/d/e")
        client.put("/d/e/f", b"x")
        self.fails(Status.FAILURE, "exists", client.mkdir, "/d")
        self.fails(Status.FAILURE, "not empty", client.path, RequestKind.RMDIR, "/d")
        self.fails(Status.FAILURE, "is a directory", client.path, RequestKind.REMOVE, "/d")
        self.fails(Status.FAILURE, "is a directory", client.open, "/d")
        self.fails(Status.FAILURE, "not a directory", client.stat, "/d/e/f/g")
        self.fails(Status.FAILURE, "not a directory", client.path, RequestKind.RMDIR, "/d/e/f")
        self.fails(Status.NO_SUCH_FILE, "no '/d/x'", client.stat, "/d/x/y")
        self.fails(Status.NO_SUCH_FILE, "no '/d/x'", client.open, "/d/x")
        self.fails(Status.FAILURE, "no other name", client.path, RequestKind.RMDIR, "/")
        self.fails(Status.FAILURE, "no other name", client.rename, "/", "/x")
        client.path(RequestKind.REMOVE, "/d/e/f")
        client.path(RequestKind.RMDIR, "/d/e")
        client.path(RequestKind.RMDIR, "/d")
        self.assertEqual(self.elsewhere().list(), {})

    def test_a_directory_with_a_file_being_written_is_not_empty(self) -> None:
        """Its close will link it there."""
        self.client.mkdir("/d")
        handle = self.client.open("/d/f", NEW)
        self.fails(Status.FAILURE, "not empty", self.client.path, RequestKind.RMDIR, "/d")
        self.client.close(handle)
        self.assertEqual(list(self.elsewhere().list("/d")), ["f"])

    def test_rename(self) -> None:
        """In one directory and between two; with and without replacing; metadata go with it."""
        client = self.client
        client.mkdir("/d")
        client.put("/a", b"a")
        client.put("/b", b"b")
        client.set("/a", times=(5, 1_234_567), mode=0o600)
        self.fails(Status.FAILURE, "exists", client.rename, "/a", "/b", False)
        client.rename("/a", "/c", False)
        client.rename("/c", "/d/b")
        client.rename("/d/b", "/b")
        self.assertEqual(set(self.elsewhere().list()), {"b", "d"})
        self.assertEqual(self.elsewhere().list("/d"), {})
        self.assertEqual(client.get("/b"), b"a")
        found = self.elsewhere().stat("/b")
        self.assertEqual((found.times, found.mode), ((1_234_567,) * 2, 0o100600))
        self.fails(Status.NO_SUCH_FILE, "no '/a'", client.rename, "/a", "/x")

    def test_rename_of_directories(self) -> None:
        """An empty one may be replaced; none gets into itself."""
        client = self.client
        for path in ("/a", "/a/b", "/e", "/full"):
            client.mkdir(path)
        client.put("/full/f", b"")
        client.put("/f", b"")
        self.fails(Status.FAILURE, "into itself", client.rename, "/a", "/a/b/c")
        self.fails(Status.FAILURE, "not empty", client.rename, "/a", "/full")
        self.fails(Status.FAILURE, "not a directory", client.rename, "/a", "/f")
        self.fails(Status.FAILURE, "is a directory", client.rename, "/f", "/a")
        client.rename("/a", "/e")
        self.assertEqual(set(self.elsewhere().list()), {"e", "f", "full"})
        self.assertEqual(set(self.elsewhere().list("/e")), {"b"})

    def test_rename_while_open(self) -> None:
        """As editors and git do: written under one name, and stored under another."""
        client = self.client
        client.put("/config", b"old")
        handle = client.open("/config.lock", NEW | OpenFlag.EXCLUSIVE)
        client.write(handle, 0, b"new")
        client.rename("/config.lock", "/config")
        self.assertEqual(client.stat("/config").size, 3)
        self.assertEqual(self.elsewhere().get("/config"), b"old")
        client.write(handle, 3, b"er")
        client.close(handle)
        self.assertEqual(self.elsewhere().get("/config"), b"newer")
        self.assertEqual(list(self.elsewhere().list()), ["config"])

    def test_rename_after_a_close_that_is_not_answered(self) -> None:
        """As sshfs does; and files are removed so."""
        client = self.client
        for name in ("a", "b", "c"):
            handle = client.open(f"/{name}", NEW)
            client.write(handle, 0, name.encode() * 60_000)
            client.ask(RequestKind.CLOSE, packed_string(handle))
            if name == "a":
                client.rename("/a", "/x")
            if name == "b":
                client.path(RequestKind.REMOVE, "/b")
            if name == "c":
                client.set("/c", times=(7, 7), mode=0o755)
        self.world.run(self.files.stored())
        other = self.elsewhere()
        self.assertEqual(set(other.list()), {"x", "c"})
        self.assertEqual(other.get("/x"), b"a" * 60_000)
        self.assertEqual((other.stat("/c").times, other.stat("/c").mode), ((7, 7), 0o100755))

    def test_attributes_right_after_a_close(self) -> None:
        """At every moment of the close's work they are stored, and not lost with what is done."""
        for ticks in range(0, 45, 4):
            path = f"/f{ticks}"
            handle = self.client.open(path, NEW)
            self.client.write(handle, 0, b"x" * 100)
            self.client.ask(RequestKind.CLOSE, packed_string(handle))
            for _ in range(ticks):
                self.world.run(self.client.tick())
            self.client.set(path, times=(7, 1000 + ticks))
        self.world.run(self.files.stored())
        for name, found in self.elsewhere().list().items():
            self.assertEqual(found.times, (1000 + int(name[1:]),) * 2)

    def test_remove_while_open(self) -> None:
        """The handle works, and its close stores nothing."""
        self.client.put("/f", b"old")
        handle = self.client.open("/f", WRITE | READ)
        self.client.path(RequestKind.REMOVE, "/f")
        self.client.write(handle, 0, b"new")
        self.assertEqual(self.client.read(handle, 0, 10), b"new")
        self.client.close(handle)
        self.assertEqual(self.elsewhere().list(), {})
        self.assertEqual(self.client.list(), {})

    def test_changes_of_one_directory_are_joined(self) -> None:
        """Files that are closed at the same time are few versions of their directory, not one each."""
        handles = []
        for number in range(40):
            handles.append(self.client.open(f"/{number}", NEW))
            self.client.write(handles[-1], 0, b"x" * number)
        began_s = self.world.clock.seconds()
        numbers = [self.client.ask(RequestKind.CLOSE, packed_string(each)) for each in handles]
        for number in numbers:
            self.client.answer(number)
        self.assertLess(self.world.clock.seconds() - began_s, 10 * 0.02)
        self.assertEqual(len(self.elsewhere().list()), 40)

    def test_two_gateways(self) -> None:
        """Both change the same directory, and nothing is lost."""
        other = self.elsewhere()
        for number in range(5):
            self.client.put(f"/a{number}", b"")
            other.put(f"/b{number}", b"")
        self.assertEqual(len(self.elsewhere().list()), 10)


class AttributesTests(SftpTestCase):
    """Modes and times are metadata of entries."""

    def test_new_files(self) -> None:
        """Their time is now; nobody but their owner may write, whatever the client asks for."""
        handle = self.client.open("/f", NEW, FileAttributes(mode=0o666))
        self.client.close(handle)
        self.client.path(RequestKind.MKDIR, "/d", FileAttributes(mode=0o777).packed())
        for client in (self.client, self.elsewhere()):
            self.assertEqual(client.stat("/f").mode, 0o100644)
            self.assertEqual(client.stat("/f").times, (1_600_000_000,) * 2)
            self.assertEqual(client.stat("/d").mode, 0o040755)
        self.now += 100
        self.client.put("/f", b"changed")
        self.assertEqual(self.elsewhere().stat("/f").times, (1_600_000_100,) * 2)

    def test_metadata_of_others_stay(self) -> None:
        """What other programs have said of a file is kept by a change of its mode."""
        link = Link("f", LitCap(b"x"), metadata={"theirs": 1, "st_mode": 0o100640, "mtime": 5.25})
        self.world.run(Directory(self.grid, self.root).change([link]))
        client = self.another()
        self.assertEqual(client.stat("/f").mode, 0o100640)
        client.set("/f", mode=0o600)
        child = self.world.run(Directory(self.grid, self.root).list())["f"]
        self.assertEqual((child.metadata["theirs"], child.metadata["mtime"]), (1, 5.25))
        self.assertEqual(child.metadata["pipegrid"], {"mode": 0o600, "mtime_ns": 5_250_000_000})

    def test_by_handle(self) -> None:
        """Of a file that is written, of one that is read, and of a directory."""
        self.client.put("/f", b"x")
        self.client.mkdir("/d")
        for handle in (
            self.client.open("/f"),
            self.client.open("/f", WRITE),
            Fields(self.client.path(RequestKind.OPENDIR, "/d")).string(100),
        ):
            change = FileAttributes(times=(9, 9), mode=0o700)
            self.client.do(RequestKind.FSETSTAT, packed_string(handle) + change.packed())
            found = Fields(self.client.do(RequestKind.FSTAT, packed_string(handle))).attributes()
            self.assertIsNotNone(found.mode)
            self.client.close(handle)
        for path in ("/f", "/d"):
            self.assertEqual(self.elsewhere().stat(path).times, (9, 9))
        handle = self.client.open("/f")
        change = FileAttributes(size=1)
        self.fails(
            Status.PERMISSION_DENIED,
            "not open for writing",
            self.client.do,
            RequestKind.FSETSTAT,
            packed_string(handle) + change.packed(),
        )

    def test_a_mode_leaves_the_time(self) -> None:
        """Also when it is stored by the close of a handle that has written nothing."""
        self.client.put("/f", b"x")
        self.client.set("/f", times=(7, 7))
        for flags in (WRITE, READ):
            handle = self.client.open("/f", flags)
            self.now += 100
            self.client.set("/f", mode=0o640)
            self.client.close(handle)
            found = self.elsewhere().stat("/f")
            self.assertEqual((found.mode, found.times), (0o100640, (7, 7)))
            self.client.set("/f", mode=0o600)

    def test_the_root(self) -> None:
        """It has no entry: what is set of it lasts as long as the session."""
        self.client.set("/", times=(3, 3), mode=0o700)
        self.assertEqual(self.client.stat("/").mode, 0o040700)
        self.assertEqual(self.another().stat("/").mode, 0o040755)

    def test_read_only_accounts(self) -> None:
        """They read all, and change nothing; each refusal says why."""
        self.client.mkdir("/d")
        self.client.put("/d/f", b"x")
        client = self.another(self.root.readonly())
        self.assertEqual(client.get("/d/f"), b"x")
        self.assertEqual(client.stat("/d/f").mode, 0o100444)
        self.assertEqual(client.stat("/").mode, 0o040555)
        for call, arguments in (
            (client.open, ("/d/f", WRITE)),
            (client.open, ("/d/g", NEW)),
            (client.mkdir, ("/e",)),
            (client.path, (RequestKind.REMOVE, "/d/f")),
            (client.path, (RequestKind.RMDIR, "/d")),
            (client.rename, ("/d/f", "/d/g")),
            (client.path, (RequestKind.SETSTAT, "/d/f", FileAttributes(mode=0).packed())),
            (client.path, (RequestKind.SETSTAT, "/d/f", FileAttributes(size=0).packed())),
        ):
            self.fails(Status.PERMISSION_DENIED, "cannot be changed", call, *arguments)
        self.assertEqual(self.client.get("/d/f"), b"x")

    def test_free_space(self) -> None:
        """In blocks, and whether it can be written."""
        for client, flags in ((self.client, 0), (self.another(self.root.readonly()), 1)):
            fields = client.extended("statvfs@openssh.com", packed_string(b"/"))
            found = struct.unpack(">11Q", fields)
            self.assertEqual((found[0], found[4], found[9]), (4096, 1_000_000, flags))

    def test_links_are_refused(self) -> None:
        """In a sentence."""
        two = packed_string(b"/a") + packed_string(b"/b")
        for kind, fields in (
            (RequestKind.SYMLINK, two),
            (RequestKind.EXTENDED, packed_string(b"hardlink@openssh.com") + two),
        ):
            self.fails(
                Status.OP_UNSUPPORTED, "links cannot be stored", self.client.do, kind, fields
            )

    def test_paths(self) -> None:
        """They are resolved by their names alone, and never lead above the account's directory."""
        for path, wanted in (
            ("", "/"),
            (".", "/"),
            ("../..", "/"),
            ("/a/../b//c/.", "/b/c"),
            ("e\u0301", "/\u00e9"),
        ):
            fields = Fields(self.client.path(RequestKind.REALPATH, path))
            self.assertEqual(fields.uint32(), 1)
            self.assertEqual(fields.string(100).decode(), wanted)
        fields = Fields(self.client.extended("expand-path@openssh.com", packed_string(b"~/a")))
        fields.uint32()
        self.assertEqual(fields.string(100), b"/a")
        for raw, why in ((b"a\0b", "NUL"), (b"\xff", "UTF-8"), (b"a/" * 2000, "names")):
            self.fails(
                Status.NO_SUCH_FILE, why, self.client.do, RequestKind.STAT, packed_string(raw)
            )


class SetMetadataTests(SftpTestCase):
    """The edit of directories that keeps the cap of a child."""

    def test_joined_with_others(self) -> None:
        """Together with a link and a rename; a child that does not exist is an error."""
        directory = Directory(self.grid, self.root)
        edits: list[Edit] = [Link("a", LitCap(b"x"), metadata={"k": 1}), SetMetadata("a", {"m": 2})]
        self.world.run(directory.change(edits))
        child = self.world.run(directory.list())["a"]
        self.assertEqual((child.metadata["k"], child.metadata["m"]), (1, 2))
        self.assertIn("linkcrtime", child.metadata["tahoe"])
        waiting = directory.change([SetMetadata("no", {})])
        with self.assertRaises(Exception) as caught:
            self.world.run(waiting)
        self.assertIn("no child", str(caught.exception))

"""
What well-known SFTP clients send, request by request, and what clients send that mean harm.

Sequences: FileZilla 3 (its fzsftp comes from PuTTY's psftp), WinSCP 6, OpenSSH's sftp, vim through a mount.
"""

from __future__ import annotations

import struct

from pipegrid.gateway.sftp import file_writer
from pipegrid.gateway.sftp.sftp_messages import (
    Fields,
    FileAttributes,
    OpenFlag,
    ReplyKind,
    RequestKind,
    Status,
    packed_string,
)
from tests.gateway.sftp_world import NEW, READ, WRITE, SftpFailure, SftpTestCase
from tests.transfer.world import content

_CREATE = WRITE | OpenFlag.CREATE


class GraphicalClientTests(SftpTestCase):
    """Requests are sent ahead, names are replaced, attributes are set afterwards."""

    def _send_writes(self, handle: bytes, data: bytes, start: int = 0) -> list[int]:
        fields = packed_string(handle)
        return [
            self.client.ask(
                RequestKind.WRITE,
                fields + struct.pack(">Q", at) + packed_string(data[at : at + 32_000]),
            )
            for at in range(start, len(data), 32_000)
        ]

    def _answered(self, numbers: list[int]) -> None:
        for number in numbers:
            answer = self.client.answer(number)
            self.assertEqual((answer.kind, answer.fields[:4]), (ReplyKind.STATUS, bytes(4)))

    def test_a_later_version(self) -> None:
        """A client of version 6 is answered by version 3, which WinSCP then speaks."""
        other = self.another()
        other.raw(struct.pack(">LBL", 5, RequestKind.INIT, 6))  # a second time it is a request
        self.assertEqual(other.channel.replies.pop(6).kind, ReplyKind.STATUS)
        name = Fields(self.client.path(RequestKind.REALPATH, "."))
        self.assertEqual((name.uint32(), name.string(10)), (1, b"/"))

    def test_filezilla(self) -> None:
        """An upload, its time; an upload that goes on where it was interrupted; a download in parallel."""
        data = content(300_000)
        self.client.mkdir("/site")
        with self.assertRaises(SftpFailure):
            self.client.mkdir("/site")  # it makes each directory of a path, and goes on
        handle = self.client.open("/site/a.bin", NEW)
        numbers = self._send_writes(handle, data[:160_000])
        numbers.append(self.client.ask(RequestKind.CLOSE, packed_string(handle)))
        self._answered(numbers)
        self.client.set("/site/a.bin", times=(1_500_000_000, 1_500_000_000))
        self.assertEqual(self.client.stat("/site/a.bin").size, 160_000)
        handle = self.client.open("/site/a.bin", _CREATE)
        numbers = self._send_writes(handle, data, 160_000)
        numbers.append(self.client.ask(RequestKind.CLOSE, packed_string(handle)))
        self._answered(numbers)
        handle = self.client.open("/site/a.bin", READ)
        size = Fields(self.client.do(RequestKind.FSTAT, packed_string(handle))).attributes().size
        self.assertEqual(size, len(data))
        fields = packed_string(handle)
        ahead = [
            self.client.ask(RequestKind.READ, fields + struct.pack(">QL", at, 32_000))
            for at in range(0, len(data) + 100_000, 32_000)
        ]
        found = b""
        for number in ahead:
            answer = self.client.answer(number)
            if answer.kind == ReplyKind.DATA:
                found += Fields(answer.fields).string(1 << 20)
            else:
                self.assertEqual(Fields(answer.fields).uint32(), Status.EOF)
        self.assertEqual(found, data)
        self.client.close(handle)

    def test_winscp(self) -> None:
        """An upload to ``.filepart``, which takes the place of the old file; its time and mode."""
        self.client.put("/report.doc", b"old")
        data = content(120_000)
        handle = self.client.open("/report.doc.filepart", NEW, FileAttributes(mode=0o644))
        self._answered(self._send_writes(handle, data))
        change = FileAttributes(times=(1_400_000_000, 1_400_000_000), mode=0o640)
        self.client.do(RequestKind.FSETSTAT, packed_string(handle) + change.packed())
        self.client.close(handle)
        self.client.path(RequestKind.REMOVE, "/report.doc")
        self.client.rename("/report.doc.filepart", "/report.doc", replace=False)
        self.assertEqual(list(self.client.list()), ["report.doc"])
        self.assertEqual(self.elsewhere().get("/report.doc"), data)
        found = self.client.stat("/report.doc")
        self.assertEqual((found.times, (found.mode or 0) & 0o777), ((1_400_000_000,) * 2, 0o640))

    def test_an_editor(self) -> None:
        """vim with a backup: the file is renamed, written anew, its mode set, and the backup removed."""
        self.client.put("/notes", b"one\n")
        self.client.open("/4913", NEW | OpenFlag.EXCLUSIVE)  # whether files can be made here
        self.client.path(RequestKind.REMOVE, "/4913")
        self.client.rename("/notes", "/notes~")
        handle = self.client.open("/notes", NEW)
        self.client.write(handle, 0, b"one\ntwo\n")
        self.client.extended("fsync@openssh.com", packed_string(handle))
        self.client.set("/notes", mode=0o600)
        self.client.close(handle)
        self.client.path(RequestKind.REMOVE, "/notes~")
        other = self.elsewhere()
        self.assertEqual(list(other.list()), ["notes"])
        self.assertEqual(other.get("/notes"), b"one\ntwo\n")
        self.assertEqual((other.stat("/notes").mode or 0) & 0o777, 0o600)


class HarmfulClientTests(SftpTestCase):
    """Offsets, handles and names that no honest client has."""

    def test_offsets(self) -> None:
        """Beyond what a file can have a write fails at once; nothing is reserved for it."""
        handle = self.client.open("/f", NEW)
        for offset in (1 << 62, (1 << 64) - 1, 1 << 50, 1 << 49, 60_000_000):
            self.fails(Status.FAILURE, "bytes", self.client.write, handle, offset, b"x")
            self.assertEqual(self.space.used_bytes, 0)
        handle = self.client.open("/g", NEW)
        for size in (1 << 62, 1 << 49):
            change = packed_string(handle) + FileAttributes(size=size).packed()
            self.fails(Status.FAILURE, "bytes", self.client.do, RequestKind.FSETSTAT, change)
        for offset in (1 << 62, (1 << 64) - 1):
            self.client.put("/h", b"x")
            self.assertEqual(self.client.read(self.client.open("/h"), offset, 100), b"")
        self.assertEqual(self.space.used_bytes, 0)

    def test_handles_that_are_never_closed(self) -> None:
        """One account cannot take all the files that may be written: others go on."""
        self.patch(file_writer, "MOST_FILES_OF_ACCOUNT", 20)
        for session in (self.client, self.another()):
            for n in range(10):
                session.open(f"/{id(session)} {n}", NEW)
        self.fails(Status.FAILURE, "20 files", self.client.open, "/more", NEW)
        self.another(self.make_directory()).put("/fine", b"x")
        self.client.leave()
        self.another().put("/fine", b"x")

    def test_names(self) -> None:
        """Names lead nowhere outside the account, however they are written."""
        self.client.put("/f", b"x")
        for path in ("/../../f", "../f", "/./../f", "//f", "/x/../../../f"):
            self.assertEqual(self.client.get(path), b"x", path)
        for path, text in (("/a\0b", "NUL"), ("/x" * 2000, "names"), ("/" + "a" * 30_000, "")):
            self.fails(Status.NO_SUCH_FILE, text, self.client.stat, path)
        self.fails(Status.NO_SUCH_FILE, "NUL", self.client.put, "/a\0b", b"x")
        self.assertEqual(list(self.client.list()), ["f"])
        long = "a" * 5000
        self.client.put(f"/{long}", b"y")
        self.assertEqual(sorted(self.client.list()), [long, "f"])

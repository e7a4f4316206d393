"""An SFTP session without SSH, on a grid in virtual time, and a client that speaks to it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed

from pipegrid.core.caps import DirectoryCap
from pipegrid.gateway.sftp.file_writer import TemporarySpace, WrittenFiles
from pipegrid.gateway.sftp.sftp_messages import (
    Fields,
    FileAttributes,
    OpenFlag,
    ReplyKind,
    RequestKind,
    Status,
    packed_string,
)
from pipegrid.gateway.sftp.sftp_session import SftpSession
from pipegrid.gateway.sftp.sftp_tree import AccountTree
from pipegrid.tree.directory_views import DirectoryViews
from pipegrid.tree.read_ahead import ReadSpace
from tests.gateway.gateway_world import GatewayTestCase

READ, WRITE = OpenFlag.READ, OpenFlag.WRITE
NEW = WRITE | OpenFlag.CREATE | OpenFlag.TRUNCATE
WINDOW_BYTES = 2 << 20


class SftpFailure(Exception):
    """A request ended with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = Status(status)


@attrs.frozen
class Answer:
    """A reply: its type, and its fields after the number of the request."""

    kind: int
    fields: bytes


class FakeChannel:
    """Takes replies of a session, and counts what it gives back of the window."""

    def __init__(self) -> None:
        self.is_blocked = False
        self.localWindowSize = WINDOW_BYTES
        self.replies: dict[int, Answer] = {}
        self.sizes: list[int] = []
        self.given_back = 0
        self.lost = False

    def write(self, data: bytes) -> None:
        """See ``sftp_session.Channel``."""
        length = int.from_bytes(data[:4], "big")
        assert length == len(data) - 4
        self.sizes.append(len(data))
        number = int.from_bytes(data[5:9], "big")
        assert data[4] == ReplyKind.VERSION or number not in self.replies
        self.replies[number] = Answer(data[4], data[9:])

    def consumed(self, count: int) -> None:
        """See ``sftp_session.Channel``."""
        self.given_back += count

    def finish(self) -> None:
        """See ``sftp_session.Channel``."""
        self.lost = True


class SftpClient:
    """Sends requests as a client does. ``world`` lets time pass until they are answered."""

    def __init__(self, test: SftpTestCase, cap: DirectoryCap) -> None:
        self.channel = FakeChannel()
        self.world = test.world
        tree = AccountTree(test.grid, cap, test.views, test.files)
        self.session = SftpSession(
            self.channel, tree, test.read_space, lambda: succeed(1_000_000 * 4096)
        )
        self._number = 10
        self.raw(struct.pack(">LBL", 5, RequestKind.INIT, 3))
        assert self.channel.replies.pop(3).kind == ReplyKind.VERSION

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.session.received(data)

    def ask(self, kind: int, fields: bytes) -> int:
        """Send a request; returns its number."""
        self._number += 1
        self.raw(struct.pack(">LBL", 5 + len(fields), kind, self._number) + fields)
        return self._number

    def answer(self, number: int) -> Answer:
        """Let time pass until a request is answered."""
        for _ in range(100_000):
            if number in self.channel.replies:
                return self.channel.replies.pop(number)
            self.world.run(self.tick())
        raise AssertionError("the request is not answered")

    def tick(self) -> Deferred[None]:
        """Fire after a millisecond."""
        waiting: Deferred[None] = Deferred()
        self.world.clock.callLater(0.001, waiting.callback, None)
        return waiting

    def do(self, kind: int, fields: bytes) -> bytes:
        """Send a request and return the fields of its reply, or raise SftpFailure."""
        found = self.answer(self.ask(kind, fields))
        if found.kind == ReplyKind.STATUS:
            got = Fields(found.fields)
            status, text = got.uint32(), got.string(10_000).decode()
            if status != Status.OK:
                raise SftpFailure(status, text)
            return b""
        return found.fields

    # Requests.

    def open(self, path: str, flags: int = READ, attributes: FileAttributes | None = None) -> bytes:
        """Return a handle."""
        attributes = attributes or FileAttributes()
        fields = packed_string(path.encode()) + struct.pack(">L", flags) + attributes.packed()
        return Fields(self.do(RequestKind.OPEN, fields)).string(100)

    def close(self, handle: bytes) -> None:
        """Close a handle."""
        self.do(RequestKind.CLOSE, packed_string(handle))

    def write(self, handle: bytes, offset: int, data: bytes) -> None:
        """Write a range."""
        self.do(
            RequestKind.WRITE,
            packed_string(handle) + struct.pack(">Q", offset) + packed_string(data),
        )

    def read(self, handle: bytes, offset: int, length: int) -> bytes:
        """Read a range; nothing at the end."""
        fields = packed_string(handle) + struct.pack(">QL", offset, length)
        try:
            return Fields(self.do(RequestKind.READ, fields)).string(1 << 20)
        except SftpFailure as error:
            if error.status != Status.EOF:
                raise
            return b""

    def put(self, path: str, data: bytes, flags: int = NEW) -> None:
        """Write a file, and close it."""
        handle = self.open(path, flags)
        for offset in range(0, len(data), 32768):
            self.write(handle, offset, data[offset : offset + 32768])
        self.close(handle)

    def get(self, path: str, step: int = 32768) -> bytes:
        """Read a file."""
        handle, found = self.open(path), b""
        while data := self.read(handle, len(found), step):
            found += data
        self.close(handle)
        return found

    def path(self, kind: int, path: str, more: bytes = b"") -> bytes:
        """Do a request whose first field is a path."""
        return self.do(kind, packed_string(path.encode()) + more)

    def stat(self, path: str) -> FileAttributes:
        """Return attributes."""
        return Fields(self.path(RequestKind.STAT, path)).attributes()

    def set(self, path: str, **attributes: Any) -> None:
        """Set attributes."""
        self.path(RequestKind.SETSTAT, path, FileAttributes(**attributes).packed())

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        self.path(RequestKind.MKDIR, path, FileAttributes().packed())

    def rename(self, old: str, new: str, replace: bool = True) -> None:
        """Rename."""
        fields = packed_string(old.encode()) + packed_string(new.encode())
        if replace:
            self.extended("posix-rename@openssh.com", fields)
        else:
            self.do(RequestKind.RENAME, fields)

    def extended(self, name: str, fields: bytes) -> bytes:
        """Do a request of an extension."""
        return self.do(RequestKind.EXTENDED, packed_string(name.encode()) + fields)

    def list(self, path: str = "/") -> dict[str, FileAttributes]:
        """List a directory."""
        handle = Fields(self.path(RequestKind.OPENDIR, path)).string(100)
        found: dict[str, FileAttributes] = {}
        self.pages = 0
        while True:
            try:
                fields = Fields(self.do(RequestKind.READDIR, packed_string(handle)))
            except SftpFailure as error:
                if error.status != Status.EOF:
                    raise
                break
            self.pages += 1
            for _ in range(fields.uint32()):
                name = fields.string(5000).decode()
                assert fields.string(6000).decode().endswith(name)
                assert name not in found
                found[name] = fields.attributes()
        self.close(handle)
        return found

    def leave(self) -> None:
        """Lose the connection."""
        self.session.closed()


class SftpTestCase(GatewayTestCase):
    """Has an account with an empty directory."""

    def setUp(self) -> None:
        super().setUp()
        self.views = DirectoryViews(self.grid)
        self.space = TemporarySpace(Path(self.mktemp()), 50_000_000)
        (self.space._directory or Path()).mkdir()
        self.now = 1_600_000_000.0
        self.files = WrittenFiles(self.grid, self.views, self.space, lambda: self.now)
        self.read_space = ReadSpace()
        self.root = self.make_directory()
        self.client = SftpClient(self, self.root)

    def another(self, cap: DirectoryCap | None = None) -> SftpClient:
        """Return another session of the same gateway."""
        return SftpClient(self, cap or self.root)

    def elsewhere(self) -> SftpClient:
        """Return a session of another gateway, which knows nothing of what this one has cached."""
        kept = self.views, self.files
        self.views = DirectoryViews(self.grid)
        self.files = WrittenFiles(self.grid, self.views, self.space, lambda: self.now)
        try:
            return SftpClient(self, self.root)
        finally:
            self.views, self.files = kept

    def fails(self, status: Status, text: str, call: Any, *arguments: Any) -> None:
        """Check how a request fails."""
        with self.assertRaises(SftpFailure) as caught:
            call(*arguments)
        self.assertEqual(caught.exception.status, status, str(caught.exception))
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("URI:", str(caught.exception))

"""An SFTP session: parses the requests of a channel, runs them, and sends the replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from struct import pack
from typing import Any, Protocol

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError
from pipegrid.gateway.sftp.sftp_handles import (
    MAX_OFFSET,
    Handle,
    OpenListing,
    WriteHandle,
    open_file,
)
from pipegrid.gateway.sftp.sftp_messages import (
    MAX_DATA_BYTES,
    MAX_HANDLE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PATH_BYTES,
    Fields,
    FileAttributes,
    MalformedRequest,
    OpenFlag,
    RequestBuffer,
    RequestKind,
    SftpError,
    Status,
    attributes_reply,
    data_reply,
    extended_reply,
    handle_reply,
    names_reply,
    packed_name,
    status_reply,
    version_reply,
)
from pipegrid.gateway.sftp.sftp_tree import (
    PAGE_BYTES,
    AccountTree,
    Path,
    is_writable,
    names_of_path,
    path_of_names,
    status_of_error,
)
from pipegrid.tree.read_ahead import ReadSpace

MOST_HANDLES = 1024
"""Maximum number of open handles in a session."""

MOST_REQUESTS = 64
"""How many requests of a session run at the same time; further ones wait in its buffer."""

_CONTENT_SHARE = 2
"""The content of all running requests has at most the channel's window divided by this number."""

_REQUEST_BYTES = 1024
"""Estimated memory of a request, in addition to its content."""

EXTENSIONS = (
    (b"posix-rename@openssh.com", b"1"),
    (b"statvfs@openssh.com", b"2"),
    (b"fstatvfs@openssh.com", b"2"),
    (b"fsync@openssh.com", b"1"),
    (b"lsetstat@openssh.com", b"1"),
    (b"limits@openssh.com", b"1"),
    (b"expand-path@openssh.com", b"1"),
)

_FRUITLESS = (
    RequestKind.READ,
    RequestKind.READDIR,
    RequestKind.OPENDIR,
    RequestKind.STAT,
    RequestKind.LSTAT,
    RequestKind.FSTAT,
)
"""Requests that only return something, so they are cancelled when the client has disconnected."""

_BLOCK_BYTES = 4096
_NO_LINKS = "symbolic and hard links cannot be stored here; copy the file instead"
_READ_ONLY = 1  # ST_RDONLY


class Channel(Protocol):
    """What a session needs from its SSH channel."""

    @property
    def is_blocked(self) -> bool:
        """Whether replies must wait; when they need not wait any more, ``SftpSession.resume`` is called."""

    @property
    def localWindowSize(self) -> int:
        """The size of the receive window: how many bytes of unfinished requests the client may send."""

    def write(self, data: bytes) -> None: ...

    def consumed(self, count: int) -> None:
        """Let the client send this many bytes more, since requests of that size are finished."""

    def finish(self) -> None:
        """Close the channel with exit status 0."""


RequestHandler = Callable[[int, Fields], Coroutine[Any, Any, bytes | None]]
"""Runs a request, given its number and fields, and returns the reply; None: the reply is status OK."""


class SftpSession:
    """
    One SFTP session on one channel.

    Args:
        tree: the tree of the account.
        free_space: returns how many bytes of files the grid can still store.
    """

    _log = Logger()

    def __init__(
        self,
        channel: Channel,
        tree: AccountTree,
        space: ReadSpace,
        free_space: Callable[[], Awaitable[int]],
    ) -> None:
        self._channel = channel
        self._tree = tree
        self._space = space
        self._free_space = free_space
        self._buffer = RequestBuffer()
        self._handles: dict[bytes, Handle] = {}
        self._opening = 0
        self._next_handle = 0
        self._running: dict[Deferred[bytes | None], int] = {}  # for each request, its type
        self._running_bytes = 0
        self._begun = False
        self._most_bytes = channel.localWindowSize // _CONTENT_SHARE
        self._ending = False
        self._closed = False
        self._pumping = False
        self._does: dict[int, RequestHandler] = {
            RequestKind.OPEN: self._open,
            RequestKind.CLOSE: self._close,
            RequestKind.READ: self._read,
            RequestKind.WRITE: self._write,
            RequestKind.LSTAT: self._stat,
            RequestKind.STAT: self._stat,
            RequestKind.FSTAT: self._fstat,
            RequestKind.SETSTAT: self._setstat,
            RequestKind.FSETSTAT: self._fsetstat,
            RequestKind.OPENDIR: self._opendir,
            RequestKind.READDIR: self._readdir,
            RequestKind.REMOVE: self._remove,
            RequestKind.MKDIR: self._mkdir,
            RequestKind.RMDIR: self._rmdir,
            RequestKind.REALPATH: self._realpath,
            RequestKind.RENAME: self._rename,
            RequestKind.READLINK: self._readlink,
            RequestKind.SYMLINK: self._symlink,
            RequestKind.EXTENDED: self._extended,
        }
        self._extensions: dict[bytes, RequestHandler] = {
            b"posix-rename@openssh.com": partial(self._rename, replace=True),
            b"statvfs@openssh.com": self._statvfs,
            b"fstatvfs@openssh.com": self._statvfs,
            b"fsync@openssh.com": self._fsync,
            b"lsetstat@openssh.com": self._setstat,
            b"limits@openssh.com": self._limits,
            b"expand-path@openssh.com": self._expand_path,
            b"hardlink@openssh.com": self._symlink,
        }

    # Input and replies.

    def received(self, data: bytes) -> None:
        if not self._closed and not self._ending:
            self._buffer.add(data)
            self.resume()

    def resume(self) -> None:
        """Begin received requests, while replies can be sent and limits allow more."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._may_begin():
                found = self._buffer.next()
                if found is None:
                    break
                self._begin(*found)
        except MalformedRequest as error:
            self._log.info("an SFTP session ends: {reason}", reason=str(error))
            self._buffer = RequestBuffer()
            self.ended()
        finally:
            self._pumping = False
        if not self._running and (self._closed or (self._ending and not self._channel.is_blocked)):
            self._end()

    def _may_begin(self) -> bool:
        return (
            (self._closed or not self._channel.is_blocked)
            and len(self._running) < MOST_REQUESTS
            and self._running_bytes < self._most_bytes
        )

    def _begin(self, kind: int, data: bytes, taken: int) -> None:
        fields = Fields(data)
        number = fields.uint32()
        if kind == RequestKind.INIT and not self._begun:
            self._begun = True
            self._answer(version_reply(EXTENSIONS), taken)
            return
        does = self._does.get(kind)
        if not self._begun or does is None:
            why = "there is no such request here" if self._begun else "the session has not begun"
            self._answer(status_reply(number, Status.OP_UNSUPPORTED, why), taken)
            return
        if self._closed and kind in _FRUITLESS:
            return
        cost = _REQUEST_BYTES + _content_bytes(kind, data)
        self._running_bytes += cost
        running = Deferred.fromCoroutine(does(number, fields))
        self._running[running] = kind
        running.addErrback(self._failed, number)
        running.addCallback(self._done, running, number, cost, taken)

    def _failed(self, failure: Failure, number: int) -> bytes:
        assert failure.value is not None
        if not failure.check(PipegridError, CancelledError):
            self._log.failure("an SFTP request failed", failure=failure)
        return status_reply(number, *status_of_error(failure.value))

    def _done(
        self, reply: bytes | None, running: Deferred[Any], number: int, cost: int, taken: int
    ) -> None:
        del self._running[running]
        self._running_bytes -= cost
        self._answer(reply or status_reply(number, Status.OK), taken)
        self.resume()

    def _answer(self, reply: bytes, taken: int) -> None:
        if not self._closed:
            self._channel.write(reply)
            self._channel.consumed(taken)

    def ended(self) -> None:
        """Note that the client sends no more requests; close the channel after the last reply."""
        self._ending = True
        self.resume()

    def closed(self) -> None:
        """
        Note that the channel is closed; files that the client has not closed are not stored.

        Running changes go on, since some clients do not wait for replies; requests that only read are
        cancelled.
        """
        if self._closed:
            return
        self._closed = True
        for running, kind in list(self._running.items()):
            if kind in _FRUITLESS:
                running.cancel()
        self.resume()

    def _end(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            Deferred.fromCoroutine(handle.close(abandon=True)).addErrback(lambda _: None)
        if not self._closed:
            self._closed = True
            self._channel.finish()

    # Handles.

    def _check_handles(self) -> None:
        if len(self._handles) + self._opening >= MOST_HANDLES:
            raise SftpError(f"{MOST_HANDLES} files and directories are open; close some of them")

    def _keep(self, handle: Handle) -> bytes:
        self._next_handle += 1
        key = self._next_handle.to_bytes(8, "big")
        self._handles[key] = handle
        return key

    def _handle(self, fields: Fields) -> Handle:
        handle = self._handles.get(fields.string(MAX_HANDLE_BYTES))
        if handle is None:
            raise SftpError("there is no such handle; it may have been closed")
        return handle

    def _write_handle(self, fields: Fields) -> WriteHandle:
        handle = self._handle(fields)
        if not isinstance(handle, WriteHandle):
            raise SftpError("the handle is not open for writing", Status.PERMISSION_DENIED)
        return handle

    @staticmethod
    def _path(fields: Fields) -> Path:
        return names_of_path(fields.string(MAX_PATH_BYTES))

    # Requests on files.

    async def _open(self, number: int, fields: Fields) -> bytes:
        path, flags, attributes = self._path(fields), fields.uint32(), fields.attributes()
        self._check_handles()
        self._opening += 1
        try:
            handle = await open_file(self._tree, self, path, flags, attributes, self._space)
        finally:
            self._opening -= 1
        return handle_reply(number, self._keep(handle))

    async def _close(self, number: int, fields: Fields) -> None:
        handle = self._handles.pop(fields.string(MAX_HANDLE_BYTES), None)
        if handle is None:
            raise SftpError("there is no such handle; it may have been closed")
        await handle.close()

    async def _read(self, number: int, fields: Fields) -> bytes:
        handle, offset, length = self._handle(fields), fields.uint64(), fields.uint32()
        if isinstance(handle, OpenListing):
            raise SftpError("the handle is that of a directory")
        if offset > MAX_OFFSET:
            return status_reply(number, Status.EOF, "the file has ended")
        data = await handle.read(offset, min(length, MAX_DATA_BYTES))
        if not data and length:
            return status_reply(number, Status.EOF, "the file has ended")
        return data_reply(number, data)

    async def _write(self, number: int, fields: Fields) -> None:
        handle, offset = self._write_handle(fields), fields.uint64()
        await handle.write(offset, fields.string(MAX_MESSAGE_BYTES))

    async def _fsync(self, number: int, fields: Fields) -> None:
        handle = self._handle(fields)
        if isinstance(handle, WriteHandle):
            await handle.sync()

    # Attributes.

    async def _stat(self, number: int, fields: Fields) -> bytes:
        spot = await self._tree.locate(self._path(fields))
        return attributes_reply(number, await self._tree.attributes(spot))

    async def _fstat(self, number: int, fields: Fields) -> bytes:
        return attributes_reply(number, await self._handle(fields).attributes())

    async def _setstat(self, number: int, fields: Fields) -> None:
        path, change = self._path(fields), fields.attributes()
        if change.size is not None:
            await self._resize(path, change)
        else:
            await self._tree.set_attributes(await self._tree.locate(path), change)

    async def _resize(self, path: Path, change: FileAttributes) -> None:
        handle = await open_file(
            self._tree, self, path, OpenFlag.WRITE, FileAttributes(), self._space
        )
        assert isinstance(handle, WriteHandle)
        try:
            await handle.set_attributes(change)
        except BaseException:
            await handle.close(abandon=True)
            raise
        await handle.close()

    async def _fsetstat(self, number: int, fields: Fields) -> None:
        handle, change = self._handle(fields), fields.attributes()
        if isinstance(handle, WriteHandle):
            await handle.set_attributes(change)
        elif change.size is not None:
            raise SftpError("the handle is not open for writing", Status.PERMISSION_DENIED)
        else:
            await self._tree.set_attributes(await self._tree.locate(handle.spot.path), change)

    # Directories and names.

    async def _opendir(self, number: int, fields: Fields) -> bytes:
        self._check_handles()
        self._opening += 1
        try:
            spot = await self._tree.locate(self._path(fields))
            cap = await self._tree.list_directory(spot)
        finally:
            self._opening -= 1
        return handle_reply(number, self._keep(OpenListing(self._tree, spot, cap)))

    async def _readdir(self, number: int, fields: Fields) -> bytes:
        handle = self._handle(fields)
        if not isinstance(handle, OpenListing):
            raise SftpError("the handle is not that of a directory")
        names = await handle.page()
        if not names:
            return status_reply(number, Status.EOF, "the directory has ended")
        return names_reply(number, names)

    async def _mkdir(self, number: int, fields: Fields) -> None:
        path, attributes = self._path(fields), fields.attributes()
        await self._tree.make_directory(await self._tree.locate(path), attributes)

    async def _rmdir(self, number: int, fields: Fields) -> None:
        await self._tree.remove_directory(await self._tree.locate(self._path(fields)))

    async def _remove(self, number: int, fields: Fields) -> None:
        await self._tree.remove_file(await self._tree.locate(self._path(fields)))

    async def _rename(self, number: int, fields: Fields, replace: bool = False) -> None:
        await self._tree.rename(self._path(fields), self._path(fields), replace)

    async def _realpath(self, number: int, fields: Fields) -> bytes:
        path = path_of_names(self._path(fields))
        return names_reply(number, [packed_name(path, path, FileAttributes())])

    async def _expand_path(self, number: int, fields: Fields) -> bytes:
        raw = fields.string(MAX_PATH_BYTES)
        path = path_of_names(
            names_of_path(raw.removeprefix(b"~") if raw[:2] in (b"~", b"~/") else raw)
        )
        return names_reply(number, [packed_name(path, path, FileAttributes())])

    async def _readlink(self, number: int, fields: Fields) -> bytes:
        raise SftpError("it is not a symbolic link; this server has none")

    async def _symlink(self, number: int, fields: Fields) -> bytes:
        raise SftpError(_NO_LINKS, Status.OP_UNSUPPORTED)

    # Extensions.

    async def _extended(self, number: int, fields: Fields) -> bytes | None:
        does = self._extensions.get(fields.string(256))
        if does is None:
            raise SftpError("there is no such extension here", Status.OP_UNSUPPORTED)
        return await does(number, fields)

    async def _statvfs(self, number: int, fields: Fields) -> bytes:
        blocks = await self._free_space() // _BLOCK_BYTES
        flags = 0 if is_writable(self._tree.root) else _READ_ONLY
        many = 1 << 32
        values = (
            _BLOCK_BYTES,
            _BLOCK_BYTES,
            blocks,
            blocks,
            blocks,
            many,
            many,
            many,
            0,
            flags,
            255,
        )
        return extended_reply(number, pack(">11Q", *values))

    async def _limits(self, number: int, fields: Fields) -> bytes:
        limits = (MAX_MESSAGE_BYTES, MAX_DATA_BYTES, MAX_DATA_BYTES, MOST_HANDLES)
        return extended_reply(number, pack(">4Q", *limits))


def _content_bytes(kind: int, data: bytes) -> int:
    """Return the bytes of content in a request, or the maximum bytes of content in its reply."""
    if kind == RequestKind.READ:
        return min(int.from_bytes(data[-4:], "big"), MAX_DATA_BYTES)
    if kind == RequestKind.READDIR:
        return PAGE_BYTES
    return len(data)

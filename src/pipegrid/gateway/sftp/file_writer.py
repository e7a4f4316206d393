"""
Files that clients write: the content is in temporary files without names until it is stored.

When a client closes a handle for writing, the whole file is stored: as a new immutable file that replaces the
linked one or, if that is mutable, as its new content. Until then the grid has the previous content.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from twisted.internet.defer import Deferred, DeferredLock, succeed

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import Link, SetMetadata
from pipegrid.errors import ChildExists
from pipegrid.gateway.sftp.sftp_attributes import metadata_changes
from pipegrid.gateway.sftp.sftp_messages import FileAttributes, SftpError
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.directory import Directory
from pipegrid.tree.directory_reading import Entry
from pipegrid.tree.directory_views import DirectoryViews, described, entry_of
from pipegrid.tree.tree_grid import Grid

MOST_FILES = 512
"""Maximum number of files that are written at the same time; each may need a temporary file."""

MOST_FILES_OF_ACCOUNT = 256
"""Maximum number of such files in all sessions of one account, so that other accounts can write, too."""

MEMORY_BYTES = 16 << 10
"""Content of up to this size stays in memory; larger content goes to a temporary file."""


class TemporarySpace:
    """
    Temporary space for all files that are being written.

    Args:
        directory: directory of the temporary files.
        most_bytes: maximum for all files together.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self.used_bytes = 0
        self.files = 0
        self._directory = directory
        self._most_bytes = most_bytes

    def take(self, count: int) -> None:
        """
        Reserve bytes; a negative count frees them.

        Raises:
            SftpError: more than ``most_bytes`` would be reserved.
        """
        if self.used_bytes + count > self._most_bytes and count > 0:
            raise SftpError(
                f"the files that are being written would take more than {self._most_bytes} bytes of "
                "temporary space; close some of them first"
            )
        self.used_bytes += count

    def open(self) -> BinaryIO:
        """
        Return a new temporary file without a name.

        Raises:
            SftpError: the file cannot be created, for example because the disk is full.
        """
        try:
            return tempfile.TemporaryFile(prefix="pipegrid-", dir=self._directory)
        except OSError as error:
            raise _no_space(error) from error


def _no_space(error: OSError) -> SftpError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SftpError("the gateway's disk for temporary files is full; free some space on it")
    return SftpError(
        f"the gateway cannot write its temporary files ({error.strerror or error}); see its 'tempdir'"
    )


def _write_all(file: BinaryIO, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    try:
        while view:
            done = os.pwrite(file.fileno(), view, offset)
            view, offset = view[done:], offset + done
    except OSError as error:
        raise _no_space(error) from error
    finally:
        view.release()


class WriteBuffer:
    """
    The content of a file that is being written: in memory up to ``MEMORY_BYTES``, then in a temporary file.

    Each method that changes the content raises SftpError if there is too little space.

    Raises:
        SftpError: too many files are being written.
    """

    def __init__(self, space: TemporarySpace) -> None:
        if space.files >= MOST_FILES:
            raise SftpError(f"{MOST_FILES} files are being written already; close some of them")
        space.files += 1
        self.size = 0
        self._space = space
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self._closed = False

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset; a gap before them is filled with zeros."""
        self._grow(max(self.size, offset + len(data)))
        if self._file is None:
            self._memory[offset : offset + len(data)] = data
        else:
            _write_all(self._file, data, offset)

    def truncate(self, size: int) -> None:
        """Change the size: cut the content, or extend it with zeros."""
        if size > self.size:
            self._grow(size)
            return
        self._space.take(size - self.size)
        self.size = size
        if self._file is None:
            del self._memory[size:]
        else:
            self._resize(self._file, size)

    def _grow(self, size: int) -> None:
        if size <= self.size:
            return
        self._space.take(size - self.size)
        before, self.size = self.size, size
        try:
            if self._file is None and size > MEMORY_BYTES:
                self._move_to_file()
            if self._file is None:
                self._memory.extend(bytes(size - before))
            else:
                self._resize(self._file, size)
        except BaseException:
            self._space.take(before - size)
            self.size = before
            raise

    def _move_to_file(self) -> None:
        file = self._space.open()
        try:
            _write_all(file, self._memory, 0)
        except BaseException:
            file.close()
            raise
        self._file = file
        self._memory.clear()

    def _resize(self, file: BinaryIO, size: int) -> None:
        try:
            os.ftruncate(file.fileno(), size)
        except OSError as error:
            raise _no_space(error) from error

    def read(self, offset: int, length: int) -> bytes:
        """Return a range of the content; the result is shorter if the range extends beyond the end."""
        if self._file is None:
            return bytes(self._memory[offset : offset + length])
        try:
            return os.pread(self._file.fileno(), length, offset)
        except OSError as error:
            raise SftpError(
                f"the gateway cannot read its temporary file ({error.strerror})"
            ) from error

    @property
    def source(self) -> BinaryIO | bytes:
        return bytes(self._memory) if self._file is None else self._file

    def close(self) -> bool:
        """Free the space of the content; return False if this was done before."""
        if self._closed:
            return False
        self._closed = True
        self._space.files -= 1
        self._space.take(-self.size)
        if self._file is not None:
            self._file.close()
        return True


@attrs.frozen
class LinkPlace:
    """Where a file can be linked: a name in a directory that the account can change."""

    directory: Directory
    name: str

    @property
    def key(self) -> tuple[bytes | None, str]:
        """Storage index and name; the storage index is the same for all caps of a directory."""
        return self.directory.cap.storage_index, self.name


@attrs.define(eq=False)
class WrittenFile:
    """
    A file that is open for writing or is being stored after a close.

    Attributes:
        owner: the session that opened the file for writing.
        account: the cap of the account's directory.
        place: where the file will be linked; None: it was removed, and its content is dropped with its last
            handle.
        entry: the file's entry in its directory; None: not linked yet.
        buffer: the content; see ``WrittenFiles.load``.
        is_loaded: whether ``buffer`` contains the grid's content; if not, the content is fetched before its
            first use.
        attributes: attributes that were set and are not stored yet.
        replace: whether the file may replace a child that another client linked after the file was opened.
        handles: number of open handles.
        writers: number of open handles for writing.
        storing: number of closes and syncs that are storing the file or wait to do so.
        is_changed: whether the content has changes that are not stored.
        is_broken: whether a write has failed; the file is not stored then, since its content is incomplete.
        is_linking: whether its directory is being changed; the place must not change meanwhile.
    """

    owner: object
    account: DirectoryCap
    place: LinkPlace | None
    entry: Entry | None
    buffer: WriteBuffer
    is_loaded: bool = True
    attributes: FileAttributes = attrs.field(factory=FileAttributes)
    replace: bool = True
    handles: int = 0
    writers: int = 0
    storing: int = 0
    is_changed: bool = False
    is_broken: bool = False
    is_linking: bool = False
    lock: DeferredLock = attrs.field(factory=DeferredLock)
    linked: Waiters[None] = attrs.field(factory=Waiters)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the entry, with the attributes that are not stored yet."""
        before = self.entry.metadata if self.entry is not None else {}
        return {**before, **metadata_changes(before, "file", self.attributes)}

    @property
    def size(self) -> int | None:
        """The size in bytes; None: not loaded yet, so the cap of the entry has the size."""
        return self.buffer.size if self.is_loaded else None

    def set_attributes(self, change: FileAttributes) -> None:
        """Set the attributes that are not None, except the size, which ``WrittenFiles.truncate`` changes."""
        self.attributes = merged(self.attributes, change)


def merged(before: FileAttributes, change: FileAttributes) -> FileAttributes:
    """Return attributes with those of ``change`` that are not None; the size is left out."""
    return FileAttributes(
        None,
        change.ids if change.ids is not None else before.ids,
        change.mode if change.mode is not None else before.mode,
        change.times if change.times is not None else before.times,
    )


class WrittenFiles:
    """
    All files that clients of one gateway are writing.

    Args:
        grid: an open grid.
        views: cached directories, which get the entries of stored files.
        now: returns the time in seconds since 1970, for modification times.
    """

    def __init__(
        self,
        grid: Grid,
        views: DirectoryViews,
        space: TemporarySpace,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._grid = grid
        self._time = now
        self._views = views
        self._space = space
        self._at: dict[tuple[bytes | None, str], WrittenFile] = {}
        self._of_account: dict[DirectoryCap, int] = {}
        self._storing = 0
        self._idle: Waiters[None] = Waiters()

    def at(self, index: bytes | None, name: str) -> WrittenFile | None:
        """
        Return the file that is being written under a name, in the directory with a storage index; None if
        there is none.
        """
        return self._at.get((index, name))

    @property
    def count(self) -> int:
        """The number of files that are being written or stored."""
        return len(self._at)

    def in_directory(self, index: bytes | None) -> list[tuple[str, WrittenFile]]:
        """Return names and files that are being written in the directory with a storage index."""
        return [(key[1], file) for key, file in self._at.items() if key[0] == index]

    def begin(
        self,
        owner: object,
        account: DirectoryCap,
        place: LinkPlace,
        entry: Entry | None,
        empty: bool,
        replace: bool,
    ) -> WrittenFile:
        """
        Begin to write a file, and return it.

        Args:
            account: the cap of the account's directory.
            empty: whether the content is empty at first; otherwise it is that of the entry's cap.
            replace: see ``WrittenFile``.

        Raises:
            SftpError: too many files are being written, by all accounts or by this one.
        """
        if self._of_account.get(account, 0) >= MOST_FILES_OF_ACCOUNT:
            raise SftpError(
                f"this account is writing {MOST_FILES_OF_ACCOUNT} files already; close some of them"
            )
        file = WrittenFile(
            owner, account, place, entry, WriteBuffer(self._space), empty, replace=replace
        )
        file.is_changed = empty
        self._of_account[account] = self._of_account.get(account, 0) + 1
        self._at[place.key] = file
        return file

    def move(self, file: WrittenFile, place: LinkPlace | None) -> None:
        """
        Move a file to another place; None removes it. Another file that is being written at that place is not
        stored.
        """
        if file.place is not None and self._at.get(file.place.key) is file:
            del self._at[file.place.key]
        file.place = place
        if place is not None:
            self.remove(place)
            self._at[place.key] = file

    def remove(self, place: LinkPlace) -> None:
        """Forget the file that is being written at a place, if any: it will not be stored."""
        there = self._at.pop(place.key, None)
        if there is not None:
            there.place = None

    async def load(self, file: WrittenFile, keep_bytes: int | None = None) -> None:
        """
        Fetch the content of a file from the grid, unless that was done; the caller holds the file's lock.

        Args:
            keep_bytes: how many bytes from the beginning are needed; None: all.

        Raises:
            PipegridError: the grid could not fetch the content, or there is no space for it.
        """
        if file.is_loaded:
            return
        if file.entry is not None and file.entry.best is not None and keep_bytes != 0:
            await self._grid.get(file.entry.best, _Filling(file.buffer), length=keep_bytes)
        file.is_loaded = True

    async def write(self, file: WrittenFile, offset: int | None, data: bytes) -> None:
        """Write bytes to a file at an offset; None appends them."""
        async with file.lock:
            try:
                await self.load(file)
                file.is_changed = True
                file.buffer.write(file.buffer.size if offset is None else offset, data)
            except BaseException:
                file.is_broken = True
                raise

    async def read(self, file: WrittenFile, offset: int, length: int) -> bytes:
        """Return a range of a file's current content."""
        async with file.lock:
            await self.load(file)
            return file.buffer.read(offset, length)

    async def truncate(self, file: WrittenFile, size: int) -> None:
        """Change the size of a file."""
        async with file.lock:
            try:
                await self.load(file, size)
                file.is_changed = True
                file.buffer.truncate(size)
                file.is_broken = file.is_broken and size > 0
            except BaseException:
                file.is_broken = True
                raise

    async def release(
        self, file: WrittenFile, has_written: bool = True, abandon: bool = False
    ) -> None:
        """
        Close a handle; if it was for writing, store the file, even if other handles are open.

        Args:
            has_written: whether the handle was for writing.
            abandon: the client has disconnected without closing the handle, so the file is not stored.

        Raises:
            PipegridError: the file could not be stored; its content is lost with its last handle.
        """
        file.handles -= 1
        file.writers -= has_written
        try:
            if has_written and not abandon:
                await self._store(file)
            elif not file.writers and not file.storing and file.is_changed:
                self.move(file, None)  # no handle is left that would store the changes
        finally:
            if not file.handles:  # else other handles are open, perhaps opened meanwhile
                self._forget(file)
            file.linked.fire(None)

    def _forget(self, file: WrittenFile) -> None:
        if file.place is not None and self._at.get(file.place.key) is file:
            del self._at[file.place.key]
        if file.buffer.close():
            left = self._of_account.pop(file.account) - 1
            if left:
                self._of_account[file.account] = left

    async def sync(self, file: WrittenFile) -> None:
        """Store the changes of an open file; raises as ``release`` does."""
        try:
            await self._store(file)
        finally:
            file.linked.fire(None)

    async def _store(self, file: WrittenFile) -> None:
        """
        Store the changes of a file.

        Raises:
            PipegridError: the file could not be stored.
        """
        self._storing += 1
        file.storing += 1
        await file.lock.acquire()
        try:
            if file.place is not None and file.is_broken:
                raise SftpError("the file is not stored, since a write to it has failed")
            if file.place is not None and file.is_changed:
                await self._store_content(file)
            elif file.place is not None and file.attributes != FileAttributes():
                await self._store_attributes(file)
        finally:
            file.is_linking = False
            file.lock.release()
            file.storing -= 1
            self._storing -= 1
            if not self._storing:
                self._idle.fire(None)

    async def _store_content(self, file: WrittenFile) -> None:
        await self.load(file)
        assert file.place is not None
        target = file.entry.best if file.entry is not None else None
        if isinstance(target, MutableCap) and target.access == "write":
            await self._grid.overwrite(target, file.buffer.source)
            self._views.sized(target, file.buffer.size)
            file.is_changed = False
            file.attributes = merged(FileAttributes(times=self.now()), file.attributes)
            await self._store_attributes(file)
            return
        looking = self._grid.look_ahead(file.place.directory.cap)
        looking.addErrback(lambda _: None)  # after a failure, the link fails as well and reports it
        try:
            cap = (await self._grid.put(file.buffer.source)).cap
            await looking
        finally:
            looking.cancel()
        if file.place is not None:  # otherwise the file was removed while it was stored
            await self._link(file, file.place, cap)

    async def _link(self, file: WrittenFile, place: LinkPlace, cap: ChkCap | LitCap) -> None:
        file.is_linking = True
        before = file.entry.metadata if file.entry is not None else {}
        attributes = merged(FileAttributes(times=self.now()), file.attributes)
        metadata = {**before, **metadata_changes(before, "file", attributes, new_content=True)}
        link = Link(place.name, cap, None, metadata, file.replace, replace_directory=False)
        try:
            await place.directory.change([link])
        except ChildExists:
            raise SftpError(
                "another client has stored something of this name since the file was opened; "
                "what was written is not stored"
            ) from None
        file.replace = True
        file.is_changed = False
        file.attributes = FileAttributes()
        metadata["tahoe"] = {"linkmotime": float(self.now()[1])}
        file.entry = entry_of(place.name, cap, metadata)
        self._views.changed(place.directory.cap, place.name, file.entry)

    async def _store_attributes(self, file: WrittenFile) -> None:
        place, entry = file.place, file.entry
        if place is None or entry is None:
            return
        file.is_linking = True
        changes = metadata_changes(entry.metadata, "file", file.attributes)
        await place.directory.change([SetMetadata(place.name, changes)])
        file.attributes = FileAttributes()
        file.entry = described(entry, changes)
        self._views.changed(place.directory.cap, place.name, file.entry)

    def now(self) -> tuple[int, int]:
        """Return the current time as SFTP's pair of times: last access and last change."""
        seconds = int(self._time())
        return seconds, seconds

    def stored(self) -> Deferred[None]:
        """Fire as soon as no file is being stored."""
        return self._idle.wait() if self._storing else succeed(None)


class _Filling(BytesIO):
    """A sink that writes a download into a ``WriteBuffer``."""

    written_in_reactor = True

    def __init__(self, buffer: WriteBuffer) -> None:
        super().__init__()
        self._buffer = buffer
        self._at = 0

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._buffer.write(self._at, piece)
        self._at += len(piece)
        return len(piece)

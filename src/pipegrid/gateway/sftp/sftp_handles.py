"""Handles that a client has open: files for reading, files for writing, and directory listings."""

from __future__ import annotations

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.gateway.sftp.file_writer import WrittenFile
from pipegrid.gateway.sftp.sftp_attributes import attributes_of_new
from pipegrid.gateway.sftp.sftp_messages import (
    FileAttributes,
    OpenFlag,
    SftpError,
    Status,
)
from pipegrid.gateway.sftp.sftp_tree import AccountTree, Path, PathTarget, no_such_file, shown
from pipegrid.tree.read_ahead import FileReader, ReadSpace

MAX_OFFSET = 1 << 50
"""Maximum size of a file; a client that requests a larger offset has made a mistake."""


@attrs.define(eq=False)
class OpenListing:
    """A handle of a directory that a client lists, with the last name sent so far."""

    tree: AccountTree
    spot: PathTarget
    cap: DirectoryCap
    after: str | None = None
    ended: bool = False

    async def page(self) -> list[bytes]:
        """Return the next entries as bytes; an empty list after the last entry."""
        if self.ended:
            return []
        names, self.after = await self.tree.page(self.cap, self.after)
        self.ended = self.after is None
        return names

    async def attributes(self) -> FileAttributes:
        """Return the attributes of the directory."""
        return await self.tree.attributes(self.spot)

    async def close(self, abandon: bool = False) -> None:
        """Do nothing: a listing holds no resources."""


@attrs.define(eq=False)
class ReadHandle:
    """A handle of a file that is open for reading; shows the file as it was when it was opened."""

    tree: AccountTree
    spot: PathTarget
    reader: FileReader

    async def read(self, offset: int, length: int) -> bytes:
        """Return a range of the file; empty if the range begins after the end."""
        return await self.reader.read(offset, length)

    async def attributes(self) -> FileAttributes:
        """Return the attributes that the file had when it was opened."""
        return await self.tree.attributes(self.spot)

    async def close(self, abandon: bool = False) -> None:
        self.reader.close()


@attrs.define(eq=False)
class WriteHandle:
    """
    A handle of a file that is being written; the handle itself can be for reading only.

    Attributes:
        append: whether all writes append to the file.
    """

    tree: AccountTree
    file: WrittenFile
    may_read: bool
    may_write: bool
    append: bool

    async def read(self, offset: int, length: int) -> bytes:
        """Return a range of the current content; empty if the range begins after the end."""
        if not self.may_read:
            raise SftpError("the file is open for writing only", Status.PERMISSION_DENIED)
        return await self.tree.files.read(self.file, offset, length)

    async def write(self, offset: int, data: bytes) -> None:
        """Write bytes into the file."""
        self._check_writable()
        _check_offset(offset + len(data))
        await self.tree.files.write(self.file, None if self.append else offset, data)

    async def set_attributes(self, change: FileAttributes) -> None:
        """Change size, owner, mode or times; the change is stored when the handle is closed."""
        self._check_writable()
        if change.size is not None:
            _check_offset(change.size)
            await self.tree.files.truncate(self.file, change.size)
        self.file.set_attributes(change)

    async def sync(self) -> None:
        """Store the changes that were written so far."""
        await self.tree.files.sync(self.file)

    async def attributes(self) -> FileAttributes:
        """Return the current attributes of the file."""
        return await self.tree.written_attributes(self.file)

    async def close(self, abandon: bool = False) -> None:
        """Close the handle, which stores the file; see ``WrittenFiles.release``."""
        await self.tree.files.release(self.file, self.may_write, abandon)

    def _check_writable(self) -> None:
        if not self.may_write:
            raise SftpError("the file is open for reading only", Status.PERMISSION_DENIED)


Handle = OpenListing | ReadHandle | WriteHandle


def _check_offset(end: int) -> None:
    if end > MAX_OFFSET:
        raise SftpError(f"a file cannot have {end} bytes; at most {MAX_OFFSET} are possible")


async def open_file(
    tree: AccountTree,
    owner: object,
    path: Path,
    flags: int,
    attributes: FileAttributes,
    space: ReadSpace,
) -> ReadHandle | WriteHandle:
    """
    Open a file, and return its handle.

    Args:
        owner: the session; if two sessions open the same file and truncate it, each writes its own copy, and
            the last close wins.
        flags: see ``OpenFlag``.
        attributes: attributes of a new file.

    Raises:
        SftpError: the file cannot be opened in this way.
    """
    spot = await tree.locate(path)
    if flags & OpenFlag.EXCLUSIVE and flags & OpenFlag.CREATE and spot.exists:
        raise SftpError(f"'{shown(path)}' exists")
    if spot.kind == "directory" or not spot.above:
        raise SftpError(f"'{shown(path)}' is a directory")
    if spot.kind == "unknown":
        raise SftpError(f"'{shown(path)}' is of a kind that this version does not know")
    if flags & OpenFlag.WRITE:
        return await _open_for_writing(tree, owner, spot, flags, attributes)
    if not flags & OpenFlag.READ:
        raise SftpError(
            "the request opens a file neither for reading nor for writing", Status.BAD_MESSAGE
        )
    if not spot.exists:
        raise no_such_file(path)
    if spot.written is not None:
        spot.written.handles += 1
        return WriteHandle(tree, spot.written, True, False, False)
    return await _open_for_reading(tree, spot, space)


async def _open_for_reading(tree: AccountTree, spot: PathTarget, space: ReadSpace) -> ReadHandle:
    assert spot.entry is not None
    cap = spot.entry.cap
    if cap is None:
        raise SftpError(f"no read cap of '{shown(spot.path)}' is known")
    size = await tree.views.size(cap)
    if size is None:
        size = await tree.grid.size(cap)  # the size query failed; this raises its error
    return ReadHandle(tree, spot, FileReader(tree.grid, cap, size, space))


async def _open_for_writing(
    tree: AccountTree, owner: object, spot: PathTarget, flags: int, attributes: FileAttributes
) -> WriteHandle:
    if not spot.exists and not flags & OpenFlag.CREATE:
        raise no_such_file(spot.path)
    place = tree.place(spot)
    truncate = bool(flags & OpenFlag.TRUNCATE)
    file = spot.written
    if file is not None and truncate and file.owner is not owner:
        file = None  # the other session keeps its own copy
    if file is None:
        replace = spot.exists or not flags & OpenFlag.EXCLUSIVE
        empty = truncate or spot.entry is None
        file = tree.files.begin(owner, tree.root, place, spot.entry, empty, replace)
        if spot.entry is None:
            file.set_attributes(attributes_of_new(attributes))
        truncate = False
    file.handles += 1
    file.writers += 1
    handle = WriteHandle(
        tree,
        file,
        bool(flags & OpenFlag.READ),
        True,
        bool(flags & OpenFlag.APPEND),
    )
    if truncate:
        try:
            await tree.files.truncate(file, 0)
        except BaseException:
            await handle.close(abandon=True)
            raise
    return handle

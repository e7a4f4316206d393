"""What a client has open: files for reading, files that are written, directories that are listed."""

from __future__ import annotations

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.gateway.sftp.file_reader import FileReader, ReadSpace
from pipegrid.gateway.sftp.file_writer import WrittenFile
from pipegrid.gateway.sftp.sftp_attributes import attributes_of_new
from pipegrid.gateway.sftp.sftp_messages import (
    MAX_DATA_BYTES,
    FileAttributes,
    OpenFlag,
    SftpError,
    Status,
)
from pipegrid.gateway.sftp.sftp_tree import AccountTree, Path, Spot, no_such_file, shown

MAX_OFFSET = 1 << 50
"""No file reaches that far; a larger number is a mistake."""


@attrs.define(eq=False)
class OpenListing:
    """A directory that is listed, and the name that was listed last."""

    tree: AccountTree
    spot: Spot
    cap: DirectoryCap
    after: str | None = None
    ended: bool = False

    async def page(self) -> list[bytes]:
        """Return the next entries; none at the end."""
        if self.ended:
            return []
        names, self.after = await self.tree.page(self.cap, self.after)
        self.ended = self.after is None
        return names

    async def attributes(self) -> FileAttributes:
        """Return those of the directory."""
        return await self.tree.attributes(self.spot)

    async def close(self, abandon: bool = False) -> None:
        """Do nothing: nothing is held."""


@attrs.define(eq=False)
class ReadHandle:
    """A file that is open for reading, as it was when it was opened."""

    tree: AccountTree
    spot: Spot
    reader: FileReader

    async def read(self, offset: int, length: int) -> bytes:
        """Return a range; nothing at the end of the file."""
        return await self.reader.read(offset, length)

    async def attributes(self) -> FileAttributes:
        """Return those that the file had when it was opened."""
        return await self.tree.attributes(self.spot)

    async def close(self, abandon: bool = False) -> None:
        self.reader.close()


@attrs.define(eq=False)
class WriteHandle:
    """
    A handle of a file that is being written; it may be for reading alone.

    Attributes:
        append: whether all that is written goes to the end.
    """

    tree: AccountTree
    file: WrittenFile
    may_read: bool
    may_write: bool
    append: bool

    async def read(self, offset: int, length: int) -> bytes:
        """Return a range as it is now; nothing at the end of the file."""
        if not self.may_read:
            raise SftpError("the file is open for writing only", Status.PERMISSION_DENIED)
        return await self.tree.files.read(self.file, offset, length)

    async def write(self, offset: int, data: bytes) -> None:
        """Put bytes into the file."""
        self._check_writable()
        _check_offset(offset + len(data))
        await self.tree.files.write(self.file, None if self.append else offset, data)

    async def set_attributes(self, change: FileAttributes) -> None:
        """Change size, mode or times, which the close stores."""
        self._check_writable()
        if change.size is not None:
            _check_offset(change.size)
            await self.tree.files.truncate(self.file, change.size)
        self.file.set_attributes(change)

    async def sync(self) -> None:
        """Store what was written so far."""
        await self.tree.files.sync(self.file)

    async def attributes(self) -> FileAttributes:
        """Return those of the file as it is now."""
        return await self.tree.written_attributes(self.file)

    async def close(self, abandon: bool = False) -> None:
        """Store what was written; see ``WrittenFiles.release``."""
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
    Open a file.

    Args:
        owner: the session; files that two sessions make at the same time are two, and the last close counts.
        flags: see ``OpenFlag``.
        attributes: of a new file.

    Raises:
        SftpError: it is not possible.
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
        raise SftpError("a file is opened for reading or for writing", Status.BAD_MESSAGE)
    if not spot.exists:
        raise no_such_file(path)
    if spot.written is not None:
        spot.written.handles += 1
        return WriteHandle(tree, spot.written, True, False, False)
    return await _open_for_reading(tree, spot, space)


async def _open_for_reading(tree: AccountTree, spot: Spot, space: ReadSpace) -> ReadHandle:
    assert spot.entry is not None
    cap = spot.entry.cap
    if cap is None:
        raise SftpError(f"no cap of '{shown(spot.path)}' is known that reads it")
    size = await tree.views.size(cap)
    if size is None:
        size = await tree.grid.size(cap)  # it failed, and says why
    return ReadHandle(tree, spot, FileReader(tree.grid, cap, size, space))


async def _open_for_writing(
    tree: AccountTree, owner: object, spot: Spot, flags: int, attributes: FileAttributes
) -> WriteHandle:
    if not spot.exists and not flags & OpenFlag.CREATE:
        raise no_such_file(spot.path)
    place = tree.place(spot)
    truncate = bool(flags & OpenFlag.TRUNCATE)
    file = spot.written
    if file is not None and truncate and file.owner is not owner:
        file = None  # that session's file stays its own
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


def data_length(length: int) -> int:
    """Return how many bytes of a read are answered; a client asks again for the rest."""
    return min(length, MAX_DATA_BYTES)

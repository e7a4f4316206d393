"""The tree of an SFTP account: paths, and the operations on files and directories."""

from __future__ import annotations

import heapq
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import attrs
from twisted.internet.defer import CancelledError

from pipegrid.core.caps import DirectoryCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import SetMetadata
from pipegrid.core.text import composed, printable
from pipegrid.errors import CapError, ChildExists, NoSuchChild, PipegridError
from pipegrid.gateway.sftp.file_writer import LinkPlace, WrittenFile, WrittenFiles, merged
from pipegrid.gateway.sftp.sftp_attributes import (
    attributes_of,
    attributes_of_new,
    long_name,
    metadata_changes,
)
from pipegrid.gateway.sftp.sftp_messages import FileAttributes, SftpError, Status, packed_name
from pipegrid.tree.directory import Child, Directory, move
from pipegrid.tree.directory_reading import Entry, Kind
from pipegrid.tree.directory_views import (
    LISTED_S,
    DirectoryViews,
    described,
    entry_of,
)
from pipegrid.tree.tree_grid import Grid

# Paths as clients write them, and which names of children can be in a path.

Path = tuple[str, ...]

MOST_NAMES = 1000
"""Maximum number of names in a path."""


def names_of_path(path: bytes) -> tuple[str, ...]:
    """
    Return the names in a path, beginning at the account's directory; ``.`` and ``..`` are resolved.

    There are no symbolic links, so ``a/..`` is the directory that contains ``a``.

    Raises:
        SftpError: the path contains a name that no child can have, or too many names.
    """
    try:
        text = path.decode("utf-8")
    except UnicodeDecodeError:
        raise SftpError(
            "the path is not UTF-8; names on a grid are Unicode", Status.NO_SUCH_FILE
        ) from None
    if "\0" in text:
        raise SftpError("the path contains a NUL, which no name may have", Status.NO_SUCH_FILE)
    names: list[str] = []
    for name in text.split("/"):
        if name == "..":
            del names[-1:]
        elif name not in ("", "."):
            names.append(composed(name))
    if len(names) > MOST_NAMES:
        raise SftpError(f"the path has more than {MOST_NAMES} names", Status.NO_SUCH_FILE)
    return tuple(names)


def path_of_names(names: Sequence[str]) -> bytes:
    """Return the path that these names form, beginning at the account's directory."""
    return ("/" + "/".join(names)).encode("utf-8")


def name_for_client(name: str) -> bytes | None:
    """
    Return the name of a child as bytes for clients; None if a path cannot contain the name, such as ``..``.

    Other programs can store such names in directories.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return None
    try:
        return name.encode("utf-8")
    except UnicodeEncodeError:
        return None


# Lookup of paths.

PAGE_BYTES = 120 << 10
"""Maximum size of one reply with directory entries: sshfs disconnects after a reply of more than 128 KiB."""

_ANY_TIME = float("inf")


@attrs.frozen
class PathTarget:
    """
    What a path leads to.

    Attributes:
        path: names, beginning at the account's directory.
        above: the directories on the path, beginning with the account's directory; empty if the path leads to
            the account's directory.
        entry: the object's entry in the last of these directories; None: not linked.
        written: the file that is being written at this path; None: there is none.
    """

    path: Path
    above: tuple[DirectoryCap, ...]
    entry: Entry | None
    written: WrittenFile | None = None

    @property
    def exists(self) -> bool:
        return self.entry is not None or self.written is not None

    @property
    def kind(self) -> Kind:
        """Kind of the object; ``file`` if it does not exist."""
        return "file" if self.written is not None or self.entry is None else self.entry.kind

    @property
    def directory(self) -> DirectoryCap:
        """
        The cap of the directory at this path.

        Raises:
            SftpError: nothing exists at this path, or an object that is not a directory.
        """
        cap = None if self.entry is None else self.entry.best
        if not self.exists:
            raise no_such_file(self.path)
        if not isinstance(cap, DirectoryCap) or self.kind != "directory":
            raise SftpError(f"'{shown(self.path)}' is not a directory")
        return cap


def shown(path: Path) -> str:
    """Return a path as text for a message."""
    return printable("/" + "/".join(path))[:300]


def no_such_file(path: Path) -> SftpError:
    """Return the error for a path that leads to nothing."""
    return SftpError(f"there is no '{shown(path)}'", Status.NO_SUCH_FILE)


def is_writable(cap: DirectoryCap) -> bool:
    """Return whether this is a write cap, which can change the directory."""
    return isinstance(cap.file, MutableCap) and cap.file.access == "write"


class AccountTree:
    """
    The tree of one account.

    Args:
        root: the account's directory; it has no entry, so its mode and times are kept only in memory.
    """

    def __init__(
        self, grid: Grid, root: DirectoryCap, views: DirectoryViews, files: WrittenFiles
    ) -> None:
        self.root = root
        self.views = views
        self.files = files
        self.grid = grid
        self._root_attributes = FileAttributes()

    async def locate(self, path: Path) -> PathTarget:
        """
        Return what a path leads to.

        Raises:
            SftpError: a directory on the path does not exist, or is not a directory.
            PipegridError: a directory on the path could not be read.
        """
        if not path:
            return PathTarget((), (), entry_of("", self.root, {}))
        above = [self.root]
        for depth, name in enumerate(path[:-1], 1):
            entry = (await self.views.view(above[-1])).entries.get(name)
            if entry is None:
                raise no_such_file(path[:depth])
            above.append(PathTarget(path[:depth], (), entry).directory)
        entry = (await self.views.view(above[-1])).entries.get(path[-1])
        written = self.files.at(above[-1].storage_index, path[-1])
        if written is not None:
            entry = written.entry
        return PathTarget(path, tuple(above), entry, written)

    def place(self, spot: PathTarget) -> LinkPlace:
        """
        Return directory and name, where a file or directory can be linked.

        Raises:
            SftpError: this is the account's own directory, or the account cannot change the directory above.
        """
        if not spot.above:
            raise SftpError("the account's own directory has no other name, and cannot be replaced")
        if not is_writable(spot.above[-1]):
            raise SftpError(
                f"'{shown(spot.path[:-1])}' cannot be changed by this account",
                Status.PERMISSION_DENIED,
            )
        return LinkPlace(Directory(self.grid, spot.above[-1]), spot.path[-1])

    # Attributes.

    async def attributes(self, spot: PathTarget) -> FileAttributes:
        """
        Return the attributes that a client gets for what a path leads to.

        Raises:
            SftpError: nothing exists at the path.
        """
        if not spot.exists:
            raise no_such_file(spot.path)
        if not spot.above:
            usual = attributes_of("directory", {}, None, is_writable(self.root))
            made = merged(usual, self._root_attributes)
            return attrs.evolve(made, mode=stat.S_IFDIR | stat.S_IMODE(made.mode or 0))
        if spot.written is not None:
            return await self.written_attributes(spot.written)
        assert spot.entry is not None
        return await self._stored_attributes(spot.entry, is_writable(spot.above[-1]))

    async def _stored_attributes(self, entry: Entry, writable: bool) -> FileAttributes:
        size = await self.views.size(entry.cap)
        return attributes_of(entry.kind, entry.metadata, size, writable)

    async def written_attributes(self, file: WrittenFile) -> FileAttributes:
        """Return the attributes that a client gets for a file that is being written."""
        size = file.size
        if size is None and file.entry is not None:
            size = await self.views.size(file.entry.best)
        return attributes_of("file", file.metadata, size or 0, True)

    async def set_attributes(self, spot: PathTarget, change: FileAttributes) -> None:
        """
        Set mode, times and owner of what a path leads to; its entry stores them.

        Raises:
            SftpError: nothing exists at the path, or the account cannot change it.
        """
        if not spot.exists:
            raise no_such_file(spot.path)
        if merged(FileAttributes(), change) == FileAttributes():
            return
        if not spot.above:
            self._root_attributes = merged(self._root_attributes, change)
            return
        place = self.place(spot)
        file = spot.written
        if file is not None and file.is_linking:
            await file.linked.wait()
            await self.set_attributes(await self.locate(spot.path), change)
            return
        if file is not None and (file.writers or file.storing):
            file.set_attributes(change)  # stored together with the content
            return
        if spot.entry is None:
            raise no_such_file(spot.path)
        changes = metadata_changes(spot.entry.metadata, spot.kind, change)
        with self._stale_if_it_fails(place):
            await place.directory.change([SetMetadata(place.name, changes)])
        entry = described(spot.entry, changes)
        if file is not None:
            file.entry = entry
        self.views.changed(place.directory.cap, place.name, entry)

    @contextmanager
    def _stale_if_it_fails(self, *places: LinkPlace) -> Iterator[None]:
        """If a change of directories fails, drop their cached views, and turn some errors into SFTP's."""
        try:
            yield
        except BaseException as error:
            for place in places:
                self.views.forget(place.directory.cap)
            if isinstance(error, NoSuchChild):
                raise SftpError("it does not exist any more", Status.NO_SUCH_FILE) from None
            if isinstance(error, ChildExists):
                raise SftpError("something of this name exists already") from None
            raise

    # Directories.

    async def list_directory(self, spot: PathTarget) -> DirectoryCap:
        """Read a directory that a client is about to list; return its cap, for use with ``page``."""
        cap = spot.directory
        await self.views.view(cap, LISTED_S)
        return cap

    async def page(self, cap: DirectoryCap, after: str | None) -> tuple[list[bytes], str | None]:
        """
        Return the packed entries that follow a name, and the last name among them; None: no entry is left.

        Children whose names cannot be in a path are left out.
        """
        view = await self.views.view(cap, _ANY_TIME)
        written = {
            name: file
            for name, file in self.files.in_directory(cap.storage_index)
            if after is None or name > after
        }
        visible = (
            (name, raw, entry, written.get(name))
            for name, entry in _with_names(view.after(after), sorted(written))
            if (raw := name_for_client(name)) is not None
        )
        chosen = list(islice(visible, PAGE_BYTES // 128))
        stored = (entry for _, _, entry, file in chosen if file is None)
        await self.views.learn_sizes([entry for entry in stored if entry is not None])
        names: list[bytes] = []
        used, writable = 0, is_writable(cap)
        for name, raw, entry, file in chosen:
            if file is not None:
                attributes = await self.written_attributes(file)
            else:
                assert entry is not None
                attributes = await self._stored_attributes(entry, writable)
            packed = packed_name(raw, long_name(name, attributes).encode("utf-8"), attributes)
            if names and used + len(packed) > PAGE_BYTES:
                break
            names.append(packed)
            used += len(packed)
            after = name
        return names, after if names else None

    async def make_directory(self, spot: PathTarget, attributes: FileAttributes) -> None:
        """
        Create a directory.

        Raises:
            SftpError: the name exists already, or the account cannot change the directory above.
        """
        place = self.place(spot)
        if spot.exists:
            raise SftpError(f"'{shown(spot.path)}' exists")
        looking = self.grid.look_ahead(place.directory.cap)
        looking.addErrback(lambda _: None)  # after a failure, the link fails as well and reports it
        try:
            made = await self.grid.create_directory()
            await looking
        finally:
            looking.cancel()
        change = FileAttributes(mode=attributes_of_new(attributes).mode, times=self.files.now())
        metadata = metadata_changes({}, "directory", change)
        with self._stale_if_it_fails(place):
            await place.directory.link(place.name, made.cap, metadata=metadata)
        self.views.made(made.cap)
        self.views.changed(
            place.directory.cap, place.name, entry_of(place.name, made.cap, metadata)
        )

    async def remove_directory(self, spot: PathTarget) -> None:
        """
        Remove an empty directory.

        Raises:
            SftpError: this is not a directory, is not empty, or was replaced by another client.
        """
        cap = spot.directory
        place = self.place(spot)
        await self._check_empty(spot.path, cap)
        assert spot.entry is not None
        child = Child(spot.entry.name, spot.entry.cap, spot.entry.write_cap)
        with self._stale_if_it_fails(place):
            if not await place.directory.unlink_same(place.name, child, True):
                self.views.forget(place.directory.cap)
                raise SftpError(
                    f"another client has replaced '{shown(spot.path)}'; it was not removed"
                )
        self.views.changed(place.directory.cap, place.name, None)

    async def _check_empty(self, path: Path, cap: DirectoryCap) -> None:
        view = await self.views.view(cap, 0.0)
        if view.entries or self.files.in_directory(cap.storage_index):
            raise SftpError(f"the directory '{shown(path)}' is not empty")

    # Files.

    async def remove_file(self, spot: PathTarget) -> None:
        """
        Remove a file; handles that are open can still read the file.

        Raises:
            SftpError: the file does not exist, or is a directory.
        """
        if not spot.exists:
            raise no_such_file(spot.path)
        if spot.kind == "directory":
            raise SftpError(f"'{shown(spot.path)}' is a directory; remove it with rmdir")
        place = self.place(spot)
        file = spot.written
        if file is not None and file.is_linking:
            await file.linked.wait()
            await self.remove_file(await self.locate(spot.path))
            return
        if file is not None:
            self.files.move(file, None)
            if file.entry is None:
                return
        with self._stale_if_it_fails(place):
            await place.directory.unlink(place.name)
        self.views.changed(place.directory.cap, place.name, None)

    # Renaming.

    async def rename(self, old: Path, new: Path, replace: bool) -> None:
        """
        Rename a file or directory, or move it to another directory.

        Args:
            replace: whether an existing file or empty directory may be replaced.

        Raises:
            SftpError: the object does not exist or cannot be changed, or the target cannot be replaced.
        """
        source, target = await self.locate(old), await self.locate(new)
        if not source.exists:
            raise no_such_file(old)
        origin, place = self.place(source), self.place(target)
        if origin.key == place.key:
            return
        await self._check_may_move(source, target, replace)
        file = source.written
        if file is None:
            assert source.entry is not None
            await self._rename_stored(source.entry, origin, place, replace)
        elif file.entry is None and not file.is_linking:
            file.replace = file.replace or replace
            self.files.move(file, place)
            if not file.writers:  # the file was closed and is being stored
                if file.storing:
                    await file.linked.wait()
                if file.entry is None:
                    raise SftpError(f"'{shown(old)}' could not be stored")
        else:
            async with file.lock:
                if file.place is None or file.place.key != origin.key or file.entry is None:
                    raise SftpError(f"'{shown(old)}' was changed at the same time; try again")
                await self._rename_stored(file.entry, origin, place, replace)
                file.entry = file.entry._replace(name=place.name)
                if self.files.at(*origin.key) is file:
                    self.files.move(file, place)

    async def _check_may_move(self, source: PathTarget, target: PathTarget, replace: bool) -> None:
        if source.kind == "directory" and source.directory in target.above:
            raise SftpError(f"'{shown(source.path)}' cannot be moved into itself")
        if not target.exists:
            return
        if not replace:
            raise SftpError(f"'{shown(target.path)}' exists")
        if target.kind == "directory":
            if source.kind != "directory":
                raise SftpError(f"'{shown(target.path)}' is a directory")
            await self._check_empty(target.path, target.directory)
        elif source.kind == "directory":
            raise SftpError(f"'{shown(target.path)}' is not a directory")

    async def _rename_stored(
        self, entry: Entry, origin: LinkPlace, place: LinkPlace, replace: bool
    ) -> None:
        self.files.remove(place)
        with self._stale_if_it_fails(origin, place):
            await move(origin.directory, origin.name, place.directory, place.name, replace)
        self.views.changed(origin.directory.cap, origin.name, None)
        self.views.changed(place.directory.cap, place.name, entry._replace(name=place.name))


def _with_names(entries: Iterator[Entry], written: list[str]) -> Iterator[tuple[str, Entry | None]]:
    """Yield names and entries, sorted by name; new files that are being written have no entry yet."""
    pairs = heapq.merge(
        ((entry.name, 0, entry) for entry in entries),
        ((name, 1, None) for name in written),
        key=lambda pair: pair[:2],
    )
    last: str | None = None
    for name, _, entry in pairs:
        if name != last:
            yield name, entry
        last = name


def status_of_error(error: BaseException) -> tuple[Status, str]:
    """Return the SFTP status of a request that raised this error, and the message for the user."""
    if isinstance(error, SftpError):
        return error.status, str(error)
    if isinstance(error, NoSuchChild):
        return Status.NO_SUCH_FILE, str(error)
    if isinstance(error, CapError):
        return Status.PERMISSION_DENIED, str(error)
    if isinstance(error, PipegridError):
        return Status.FAILURE, str(error)
    if isinstance(error, CancelledError):
        return Status.FAILURE, "the gateway is closing"
    return Status.FAILURE, "the gateway failed unexpectedly; its log has the details"

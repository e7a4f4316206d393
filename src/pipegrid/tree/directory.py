"""Mutable directories: reading them, editing them, following paths, and moving children."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar, get_args

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from pipegrid.argument_checks import check_callable, check_kind
from pipegrid.core.caps import (
    Cap,
    DirectoryCap,
    MutableCap,
    UnknownCap,
    as_cap,
    parse_cap,
    unknown_kind,
    writes,
)
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.mutable.directory_content_edits import (
    Edit,
    Link,
    OpenDirectory,
    Rename,
    SetMetadata,
    Unlink,
    apply_edits,
    content_if_applied,
    edited,
    merge_directories,
    name_bytes,
    pack_entries,
    pack_new,
)
from pipegrid.core.text import composed, printable
from pipegrid.errors import CapError, ChildExists, NoSuchChild, PipegridError, UsageError
from pipegrid.reactor.deferreds import as_deferred, start_cancellable
from pipegrid.transfer.mutable.publish import CreateResult, WriteResult
from pipegrid.transfer.mutable.write_queue import StepwiseEdit
from pipegrid.transfer.results import PutResult
from pipegrid.tree.directory_reading import (
    ENTRY_BYTES,
    Entry,
    Kind,
    ListingLimits,
    kind_of,
    metadata_of,
    read_listing,
)

# The classes below apply the edits of one change to a directory. A batch of changes parses the directory only
# once.


class NamesEdit(StepwiseEdit):
    """
    Edits that take effect together or not at all.

    Args:
        writekey: the write key of the directory, 16 bytes.
        now: returns the seconds since 1970, for the times of links.
    """

    def __init__(self, edits: Sequence[Edit], writekey: bytes, now: Callable[[], float]) -> None:
        self._edits = edits
        self._writekey = writekey
        self._now = now
        self._repeated = False

    def open(self, content: bytes) -> OpenDirectory:
        """See ``StepwiseEdit``; raises DirectoryError if the content is not a directory."""
        return OpenDirectory.of(content)

    def step(self, opened: OpenDirectory) -> OpenDirectory:
        """
        See ``StepwiseEdit``; raises the same errors as ``core.mutable.directory_content_edits.apply_edits``.
        """
        return edited(opened, self._edits, self._writekey, self._now(), self._repeated)

    def close(self, opened: OpenDirectory) -> bytes:
        return pack_entries(opened.entries)

    def memory_bytes(self, opened: OpenDirectory) -> int:
        """Return the approximate memory of a parsed directory: its bytes, and the objects for its entries."""
        return opened.size + ENTRY_BYTES * len(opened.entries)

    def may_be_stored(self) -> None:
        """See ``StepwiseEdit``; from now on it is no error if a child to be removed does not exist."""
        self._repeated = True


class UnlinkIfSame(NamesEdit):
    """
    Remove a child, unless another client has replaced it since this client saw it.

    Args:
        read_cap: the read cap of the child that this client saw; None if it is unknown.
        must_exist: whether it is an error if another client has removed the child.

    Attributes:
        kept: whether the name now belongs to another child, which stays.
    """

    def __init__(self, name: str, read_cap: object, must_exist: bool, writekey: bytes) -> None:
        super().__init__([Unlink(name, must_exist)], writekey, lambda: 0.0)
        self.kept = False
        self._name = composed(name)
        self._read_cap = read_cap

    def step(self, opened: OpenDirectory) -> OpenDirectory:
        there = opened.entries.get(self._name)
        self.kept = there is not None and there.read_cap != self._read_cap
        return opened if self.kept else super().step(opened)


class ChosenEdit(StepwiseEdit):
    """
    Edits that depend on the content of the directory.

    Args:
        choose: returns the edits for the bytes of the directory.
        writekey, now: see ``NamesEdit``.

    Attributes:
        result: the bytes of the directory after the last ``step``.
    """

    def __init__(
        self,
        choose: Callable[[bytes], Sequence[Edit]],
        writekey: bytes,
        now: Callable[[], float],
    ) -> None:
        self.result = b""
        self._choose = choose
        self._writekey = writekey
        self._now = now
        self._repeated = False

    def open(self, content: bytes) -> bytes:
        """See ``StepwiseEdit``; the bytes are returned without being parsed."""
        return content

    def step(self, opened: bytes) -> bytes:
        """
        See ``StepwiseEdit``; raises the same errors as ``core.mutable.directory_content_edits.apply_edits``.
        """
        edits = self._choose(opened)
        made = apply_edits(opened, edits, self._writekey, self._now(), self._repeated)
        self.result = made
        return opened if made == opened else made

    def close(self, opened: bytes) -> bytes:
        return opened

    def may_be_stored(self) -> None:
        self._repeated = True


# The functions below check the edits that callers pass, before any work begins.


def checked_edits(edits: Sequence[Edit]) -> list[Edit]:
    """
    Return the edits of a caller as a new list, in which caps that were given as text are parsed.

    Raises:
        CapError, UsageError: an item is not an edit, or its child cannot be linked with this cap, name or
            metadata.
    """
    check_kind(edits, Iterable, "what to change", "a list of edits")
    return [_checked(edit) for edit in edits]


def _checked(edit: Edit) -> Edit:
    kinds = "a Link, an Unlink, a Rename or a SetMetadata"
    check_kind(edit, get_args(Edit), "an edit", kinds, secret=True)
    if isinstance(edit, Link):
        check_link(edit.name, edit.metadata)
        read_cap = None if edit.read_cap is None else as_cap(edit.read_cap)
        return attrs.evolve(edit, cap=as_cap(edit.cap), read_cap=read_cap)
    if isinstance(edit, Rename):
        check_kind(edit.old, str, "the name of a child", "text")
        check_name(edit.new)
    else:
        check_kind(edit.name, str, "the name of a child", "text")
    if isinstance(edit, SetMetadata):
        check_kind(edit.changes, Mapping, "the metadata of a child", "a dict")
    return edit


def check_link(name: str, metadata: dict[str, Any] | None) -> None:
    """
    Check the name and metadata with which a child will be linked.

    Raises:
        UsageError: no child can be linked with this name or metadata.
    """
    check_name(name)
    check_kind(metadata, (dict, type(None)), "the metadata of a child", "a dict")


def check_name(name: str) -> None:
    """
    Check the name of a child.

    Raises:
        UsageError: no child can be linked under this name.
    """
    check_kind(name, str, "the name of a child", "text")
    if not name:
        raise UsageError(
            "the name of a child has a character at least; no path leads to an empty one"
        )
    name_bytes(composed(name))


# Directories that can be changed.
#
# A change reads the directory, applies edits, and publishes the result. If another writer was faster, the
# edits are applied again to the version of that writer, so that both changes take effect. All edits of one
# call are published together.

S = TypeVar("S", PutResult, CreateResult)


class ChangesFiles(Protocol):
    """The methods of a grid that changing directories needs."""

    def read(self, cap: str | Cap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Fetch a file, or a range of it, into memory."""

    def modify(
        self,
        cap: str | Cap,
        function: Callable[[bytes], bytes],
        *,
        merge: Callable[[Sequence[bytes]], bytes] | None = None,
        remembered: bytes | None = None,
        redo: Callable[[bytes, bytes, bytes], bytes | None] | None = None,
    ) -> Deferred[WriteResult]:
        """Apply a function to the content of a mutable file."""

    def look_ahead(self, cap: str | Cap) -> Deferred[None]:
        """Fetch in advance what the next change of a mutable file will need."""

    @property
    def clock(self) -> IReactorTime:
        """The reactor as a source of time."""

    @property
    def put(self) -> Callable[..., Deferred[PutResult]]:
        """``Grid.put``, which stores an immutable file; fires with its cap in a ``PutResult``."""

    def create_mutable(
        self,
        source: Any,
        *,
        format: str | None = None,
        params: Params | None = None,
        private_key: bytes | None = None,
    ) -> Deferred[CreateResult]:
        """Store a new mutable file."""


@attrs.frozen
class Child:
    """
    One entry of a directory.

    Attributes:
        name: any text, normalized (NFC).
        read_cap: the child's read cap; None if none is stored.
        write_cap: the child's write cap; None if the child cannot change, or the directory's cap does not
            reveal its write cap.
        metadata: the metadata of the entry; empty if it is too large.
    """

    name: str
    read_cap: Cap | None
    write_cap: Cap | None = attrs.field(default=None, repr=False)
    metadata: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def cap(self) -> Cap | None:
        """The cap of the child that grants most."""
        return self.write_cap or self.read_cap

    @property
    def kind(self) -> Kind:
        """The kind of the child according to its cap; see ``kind_of``."""
        return kind_of(self.cap)


class Directory:
    """
    A directory on a grid: a read cap suffices to list it, and changes need its write cap.

    Args:
        now: returns the seconds since 1970, for the times of links.

    Raises:
        CapError: the cap is malformed, or not the cap of a directory.
    """

    def __init__(
        self, grid: ChangesFiles, cap: str | Cap, now: Callable[[], float] = time.time
    ) -> None:
        parsed = as_cap(cap)
        if not isinstance(parsed, DirectoryCap):
            raise CapError("this is not the cap of a directory, and this works on directories only")
        self._grid = grid
        self._now = now
        self.cap = parsed

    @property
    def is_writable(self) -> bool:
        """Whether the cap can change the directory."""
        return writes(self.cap)

    @as_deferred
    async def list(self, limits: ListingLimits | None = None) -> dict[str, Child]:
        """
        Read the directory; the Deferred fires with its children by name, in ascending order.

        Raises (through the Deferred):
            CapError: this is a verify cap, which cannot list the directory.
            DirectoryError: the directory is damaged, or exceeds the limits.
            PipegridError: the grid could not fetch the directory.
        """
        listing = await read_listing(self._grid, self.cap, limits)
        return {entry.name: self._child(entry) for entry in listing.entries}

    def _child(self, entry: Entry) -> Child:
        return Child(entry.name, entry.cap, entry.write_cap, metadata_of(entry.metadata_json))

    @as_deferred
    async def link(
        self,
        name: str,
        cap: str | Cap,
        *,
        metadata: dict[str, Any] | None = None,
        replace: bool = False,
    ) -> WriteResult:
        """
        Put a child into the directory; see ``core.mutable.directory_content_edits.Link``.

        Raises (through the Deferred):
            ChildExists: a child has this name and ``replace`` does not allow replacing it.
            CapError, UsageError: the cap is malformed, reads nothing, or cannot be linked.
            others: what ``change`` raises.
        """
        child = as_cap(cap)
        if not str(child):
            raise CapError("the cap is empty; give the cap of a file or directory")
        return await self.change([Link(name, child, metadata=metadata, replace=replace)])

    def put(
        self,
        name: str,
        source: Any,
        *,
        metadata: dict[str, Any] | None = None,
        replace: bool = False,
        stored: Callable[[Cap], object] = lambda cap: None,
        **options: Any,
    ) -> Deferred[PutResult]:
        """
        Store an immutable file and link it; the Deferred fires with the result of ``Grid.put`` after both.

        The directory is read while the file is stored, so linking takes only one more round trip.

        Args:
            source, options: see ``Grid.put``.
            metadata, replace: see ``link``.
            stored: called with the file's cap when it is stored, before it is linked.

        Raises (through the Deferred):
            ChildExists: a child has this name and ``replace`` does not allow replacing it; the file is
                stored, but not linked.
            others: what ``Grid.put`` and ``change`` raise.
        """
        store = partial(self._grid.put, source, **options)
        work = self._put(name, store, metadata, replace, stored)
        return start_cancellable(work, self._grid.clock)  # ``stored`` may cancel the Deferred

    def put_mutable(
        self,
        name: str,
        source: Any,
        *,
        metadata: dict[str, Any] | None = None,
        replace: bool = False,
        stored: Callable[[Cap], object] = lambda cap: None,
        **options: Any,
    ) -> Deferred[CreateResult]:
        """
        Store a new mutable file and link it; the Deferred fires with the result of ``Grid.create_mutable``.

        Args:
            source, options: see ``Grid.create_mutable``.

        The other arguments and errors are those of ``put``.
        """
        store = partial(self._grid.create_mutable, source, **options)
        work = self._put(name, store, metadata, replace, stored)
        return start_cancellable(work, self._grid.clock)

    async def _put(
        self,
        name: str,
        store: Callable[[], Deferred[S]],
        metadata: dict[str, Any] | None,
        replace: bool,
        on_stored: Callable[[Cap], object],
    ) -> S:
        self._writekey()
        check_link(name, metadata)  # check this before anything is stored
        check_callable(on_stored, "stored")
        looking = self._grid.look_ahead(self.cap)
        looking.addErrback(lambda _: None)  # if reading fails, the change fails and reports it
        try:
            stored = await store()
            on_stored(stored.cap)
            await looking
        finally:
            looking.cancel()
        await self.change([Link(name, stored.cap, metadata=metadata, replace=replace)])
        return stored

    def unlink(self, name: str, *, must_exist: bool = True) -> Deferred[WriteResult]:
        """
        Remove a child from the directory; its shares stay on the servers.

        Raises (through the Deferred):
            NoSuchChild: no child has this name.
            others: what ``change`` raises.
        """
        return self.change([Unlink(name, must_exist)])

    def rename(self, old: str, new: str, *, replace: bool = False) -> Deferred[WriteResult]:
        """
        Give a child another name; its caps and metadata stay.

        Raises (through the Deferred):
            NoSuchChild: no child has the old name.
            ChildExists: a child has the new name and ``replace`` does not allow replacing it.
            others: what ``change`` raises.
        """
        return self.change([Rename(old, new, replace)])

    @as_deferred
    async def change(self, edits: Sequence[Edit]) -> WriteResult:
        """
        Apply edits (``Link``, ``Unlink``, ``Rename``, ``SetMetadata``) in order, in one publish: all or none.

        Raises (through the Deferred):
            CapError: the cap is not a write cap, or the directory is immutable.
            DirectoryError: the stored content is not a directory.
            UnhappyError: too few servers accepted the new version.
            UncoordinatedWriteError: at each attempt, another client changed the directory first.
            UsageError: an item is not an edit, or a name cannot be part of a path.
        """
        apply = NamesEdit(checked_edits(edits), self._writekey(), self._now)
        return await self._grid.modify(self.cap, apply, merge=_merge, redo=content_if_applied)

    async def change_by(
        self, choose: Callable[[bytes], Sequence[Edit]], remembered: bytes | None = None
    ) -> tuple[bytes, WriteResult]:
        """
        Apply edits that depend on the content of the directory, in one publish.

        Args:
            choose: returns the edits for the bytes of the directory; called again if another client changed
                it.
            remembered: the bytes that this client saw last, if it kept them; see ``Grid.modify``.

        Returns:
            the new bytes of the directory, and the result of the write.

        Raises: the same errors as ``change``.
        """
        edit = ChosenEdit(choose, self._writekey(), self._now)
        written = await self._grid.modify(self.cap, edit, merge=_merge, remembered=remembered)
        return edit.result, written

    def applied(self, content: bytes, edits: Sequence[Edit]) -> bytes:
        """Return the bytes of this directory after some edits, without a request to the grid."""
        return apply_edits(content, edits, self._writekey(), self._now())

    async def unlink_same(self, name: str, child: Child, must_exist: bool = False) -> bool:
        """
        Remove a child, unless another client has replaced it; return whether the child is gone.

        Raises:
            NoSuchChild: another client has removed the child, and ``must_exist`` is set.
        """
        edit = UnlinkIfSame(name, child.read_cap, must_exist, self._writekey())
        await self._grid.modify(self.cap, edit, merge=_merge)
        return not edit.kept

    def _writekey(self) -> bytes:
        check_writable(self.cap)
        assert isinstance(self.cap.file, MutableCap)
        return self.cap.file.secret


def check_writable(cap: Cap | None, about: str = "this directory") -> DirectoryCap:
    """
    Return the cap, if it can change a directory.

    Raises:
        CapError: the cap cannot change a directory; the message gives the reason.
    """
    if not isinstance(cap, DirectoryCap):
        raise CapError(f"{about} is not a directory, and names can be changed only in one")
    file = cap.file
    if not isinstance(file, MutableCap):
        raise CapError(
            f"{about} is immutable and can never change; make one that can with 'pipegrid mkdir'"
        )
    if file.access == "verify":
        raise CapError(
            f"the cap of {about} is a verifier cap, which cannot change it; use its write cap"
        )
    if file.access != "write":
        raise CapError(
            f"the cap of {about} reads it and cannot change it; use its write cap, or ask for it"
        )
    return cap


async def create_directory(
    grid: ChangesFiles,
    format: str | None = None,
    children: Sequence[Link] = (),
    private_key: bytes | None = None,
) -> Directory:
    """
    Store a directory; see ``Grid.create_directory``.

    Args:
        children: the first children; their metadata is stored unchanged.
        private_key: see ``Grid.create_mutable``.

    Raises:
        CapError, UsageError: a child cannot be linked.
    """
    links = [each for each in checked_edits(children) if isinstance(each, Link)]
    content = partial(pack_new, links) if links else b""
    result = await grid.create_mutable(content, format=format, private_key=private_key)
    return Directory(grid, DirectoryCap(result.cap))


def _merge(versions: Sequence[bytes]) -> bytes:
    return reduce(merge_directories, versions)


# Moving: linking a child in its new place, then unlinking it from its old place.


async def move(
    source: Directory,
    name: str,
    target: Directory,
    new_name: str,
    replace: bool = False,
    replace_directory: bool = True,
) -> None:
    """
    Give a child another name, or move it to another directory: link it in ``target``, then unlink it from
    ``source``.

    The metadata of the child moves too. ``replace`` and ``replace_directory`` are those of ``Link``. If the
    move is interrupted between its two halves, the child is in both directories; the same move again
    completes it.

    Raises:
        NoSuchChild, ChildExists: as for ``Directory.rename``, except that the child itself may already be in
            its new place.
        CapError: one of the directories cannot be changed.
        UsageError: another client has meanwhile replaced the child in ``source``, and the new child stays
            there; or has removed the child, perhaps by moving it.
        PipegridError: unlinking failed; the message begins by saying that the child is now in both places.
    """
    check_writable(source.cap, "the directory of the moved entry")
    check_writable(target.cap, "the target of the move")
    if source.cap == target.cap:
        await source.change([Rename(name, new_name, replace, replace_directory)])
        return
    child = (await source.list()).get(composed(name))
    if child is None:
        raise NoSuchChild(f"there is no '{printable(name)}' in the directory; check the path", name)
    try:
        link = attrs.evolve(link_of(child, new_name, replace), replace_directory=replace_directory)
        await target.change([link])
    except ChildExists:
        if not is_same(child, (await target.list()).get(composed(new_name))):
            raise
    try:
        is_out = await source.unlink_same(name, child, True)
    except NoSuchChild:
        # The link is not undone: if an earlier attempt at this move unlinked the child, the new place is the
        # only one.
        raise UsageError(
            f"another client removed '{printable(name)}' from its old place while it was moved; it is in "
            "its new place, and perhaps also where that client has moved it"
        ) from None
    except PipegridError as error:
        error.args = (
            f"'{printable(name)}' is now in both places; to finish, run the same command "
            f"again: {error}",
        )
        raise
    if not is_out:
        raise UsageError(
            f"'{printable(name)}' was replaced by another client while it was moved: what it was "
            f"is in its new "
            "place, and what it is now stays where it is"
        )


def is_same(child: Child, other: Child | None) -> bool:
    """Return whether both children have the same cap, so that replacing one by the other changes nothing."""
    return other is not None and child.cap is not None and child.cap == other.cap


def link_of(child: Child, name: str, replace: bool = False) -> Link:
    """
    Return the edit that links a child in another place, with its metadata.

    Raises:
        CapError: no cap of the child is known.
    """
    if child.cap is None:
        raise CapError(
            f"'{printable(child.name)}' cannot be linked, since none of its caps is known"
        )
    both = isinstance(child.write_cap, UnknownCap)
    return Link(name, child.cap, child.read_cap if both else None, dict(child.metadata), replace)


# Following a path from a mutable directory, and creating missing directories of the path.


async def look_up(grid: ChangesFiles, root: str | Cap, names: Sequence[str]) -> list[Child]:
    """
    Return the root of a path and the child for each name, with write caps where they are known.

    Returns:
        the root and the children, in the order of the path; the list ends early where a name does not exist.

    Raises:
        NoSuchChild: a name is below something that is not a directory.
        CapError: the root is not a well-formed cap.
        PipegridError: a directory could not be read.
    """
    cap = parse_cap(root.strip()) if isinstance(root, str) else root
    read_cap = cap if isinstance(cap, UnknownCap) else cap.readonly()
    way = [Child("", read_cap, cap if cap != read_cap else None)]
    for depth, name in enumerate(names):
        here = way[-1].cap
        if isinstance(here, UnknownCap) and not depth:
            raise unknown_kind(here)
        if not isinstance(here, DirectoryCap):
            what = printable("/".join(names[:depth]))
            raise NoSuchChild(
                f"'{what}' is not a directory, so there is no '{printable(name)}' in it; check the path"
                if depth
                else "the cap before the path is not that of a directory; check the path",
                name,
            )
        found = (await Directory(grid, here).list()).get(composed(name))
        if found is None:
            break
        way.append(found)
    return way


async def make_directories(
    grid: ChangesFiles, root: str | Cap, names: Sequence[str], format: str | None = None
) -> Directory:
    """
    Return the directory at the end of a path; missing directories are created.

    Raises:
        ChildExists: a name of the path belongs to a file.
        CapError: a directory that lacks the next name cannot be changed.
        UsageError: no directory can have one of these names; nothing was created.
        PipegridError: the grid failed.
    """
    way = await look_up(grid, root, names)
    here = way[-1]
    if not isinstance(here.cap, DirectoryCap):
        raise ChildExists(
            f"'{printable(here.name)}' exists and is not a directory; choose another name",
            here.name,
        )
    directory = Directory(grid, here.cap)
    absent = names[len(way) - 1 :]
    for name in absent:
        check_name(name)
    for name in absent:
        is_first = directory.cap == way[0].cap or not here.name
        check_writable(directory.cap, "this directory" if is_first else f"'{printable(here.name)}'")
        made = await create_directory(grid, format)
        try:
            await directory.link(name, made.cap)
            directory = made
        except ChildExists:  # another client created it at the same time
            there = (await directory.list()).get(composed(name))
            if there is None or not isinstance(there.cap, DirectoryCap):
                raise
            directory = Directory(grid, there.cap)
    return directory

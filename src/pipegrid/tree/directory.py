"""
Directories that can change.

Each change is read, applied and published; a writer who was beaten by another applies it again to what is
there now, so that nobody's change is lost, and several changes of one call are one publish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from pipegrid.arguments import check_callable
from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, as_cap
from pipegrid.core.mutable.edits import Edit, Link, Rename, Unlink, apply_edits
from pipegrid.core.mutable.merging import made_before, merge_directories
from pipegrid.core.params import Params
from pipegrid.errors import CapError
from pipegrid.reactor.together import as_deferred, begun
from pipegrid.transfer.mutable.written import CreateResult, WriteResult
from pipegrid.transfer.results import PutResult
from pipegrid.tree.applying import ChosenEdit, NamesEdit, TakeOutEdit
from pipegrid.tree.givenedits import check_link, checked_edits
from pipegrid.tree.listing import Entry, Kind, ListingLimits, kind_of, metadata_of, read_listing

S = TypeVar("S", PutResult, CreateResult)


class ChangesFiles(Protocol):
    """What changing directories needs of a grid."""

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
        """Find out what the next change of a mutable file needs to know."""

    @property
    def clock(self) -> IReactorTime:
        """The reactor, as far as it tells the time."""

    @property
    def put(self) -> Callable[..., Deferred[PutResult]]:
        """``Grid.put``, which stores an immutable file, and fires with its cap in a ``PutResult``."""

    def create_mutable(
        self, source: Any, *, format: str | None = None, params: Params | None = None
    ) -> Deferred[CreateResult]:
        """Store a new mutable file."""


@attrs.frozen
class Child:
    """
    One entry of a directory.

    Attributes:
        name: composed (NFC), any text.
        read_cap: what reads it; None if nothing is stored that does.
        write_cap: what changes it; None if it cannot change, or the directory's cap does not tell.
        metadata: what its entry says; without what is beyond all bounds.
    """

    name: str
    read_cap: Cap | None
    write_cap: Cap | None = attrs.field(default=None, repr=False)
    metadata: dict[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def cap(self) -> Cap | None:
        """The cap that grants most."""
        return self.write_cap or self.read_cap

    @property
    def kind(self) -> Kind:
        """What is there, as its cap tells; see ``kind_of``."""
        return kind_of(self.cap)


class Directory:
    """
    A directory, by its cap: any that lists it; to change it, its write cap.

    Args:
        now: seconds since 1970, for the times of links.

    Raises:
        CapError: the cap is malformed, or not that of a directory.
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
        """Whether the cap changes the directory."""
        return isinstance(self.cap.file, MutableCap) and self.cap.file.access == "write"

    @as_deferred
    async def list(self, limits: ListingLimits | None = None) -> dict[str, Child]:
        """
        Read the directory; fires with its children by name, in ascending order.

        Raises (through the Deferred):
            CapError: a verifier cap lists nothing.
            DirectoryError: it is damaged, or beyond the limits.
            PipegridError: the grid could not fetch it.
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
        Put a child into the directory; see ``core.mutable.edits.Link``.

        Raises (through the Deferred):
            ChildExists: there is one of this name, and it is not to be replaced.
            CapError, UsageError: the cap is malformed, reads nothing, or cannot be linked.
            and what ``change`` raises.
        """
        return await self.change([Link(name, as_cap(cap), metadata=metadata, replace=replace)])

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
        Store an immutable file and link it; fires with what ``Grid.put`` did when it is in the directory.

        While it is stored, the directory is looked at, so that linking is one round trip more.

        Args:
            source, options: see ``Grid.put``.
            metadata, replace: see ``link``.
            stored: called with the file's cap when it is stored, before it is linked.

        Raises (through the Deferred):
            ChildExists: there is one of this name, and it is not to be replaced; the file is stored, though.
            and what ``Grid.put`` and ``change`` raise.
        """
        return self._put(name, lambda: self._grid.put(source, **options), metadata, replace, stored)

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
        Store a new mutable file and link it; fires with what ``Grid.create_mutable`` did.

        Args:
            source, options: see ``Grid.create_mutable``.

        Otherwise as ``put``.
        """
        return self._put(
            name, lambda: self._grid.create_mutable(source, **options), metadata, replace, stored
        )

    def _put(
        self,
        name: str,
        store: Callable[[], Deferred[S]],
        metadata: dict[str, Any] | None,
        replace: bool,
        told: Callable[[Cap], object],
    ) -> Deferred[S]:
        # ``told`` may give up.
        return begun(self._stored(name, store, metadata, replace, told), self._grid.clock)

    async def _stored(
        self,
        name: str,
        store: Callable[[], Deferred[S]],
        metadata: dict[str, Any] | None,
        replace: bool,
        told: Callable[[Cap], object],
    ) -> S:
        self._writekey()
        check_link(name, metadata)  # before anything is stored
        check_callable(told, "stored")
        looking = self._grid.look_ahead(self.cap)
        looking.addErrback(lambda _: None)  # the change will meet it again, and say so
        try:
            stored = await store()
            told(stored.cap)
            await looking
        finally:
            looking.cancel()
        await self.change([Link(name, stored.cap, metadata=metadata, replace=replace)])
        return stored

    def unlink(self, name: str, *, must_exist: bool = True) -> Deferred[WriteResult]:
        """
        Take a child out of the directory; what it was stays on the servers.

        Raises (through the Deferred):
            NoSuchChild: there is none of this name.
            and what ``change`` raises.
        """
        return self.change([Unlink(name, must_exist)])

    def rename(self, old: str, new: str, *, replace: bool = False) -> Deferred[WriteResult]:
        """
        Give a child another name; its caps and metadata stay.

        Raises (through the Deferred):
            NoSuchChild: there is none of the old name.
            ChildExists: there is one of the new name, and it is not to be replaced.
            and what ``change`` raises.
        """
        return self.change([Rename(old, new, replace)])

    @as_deferred
    async def change(self, edits: Sequence[Edit]) -> WriteResult:
        """
        Apply edits (``core.mutable.edits``) in their order, in one publish; all take effect, or none does.

        Raises (through the Deferred):
            CapError: the cap does not write, or the directory can never change.
            DirectoryError: what is stored is no directory.
            UnhappyError: too few servers took it.
            UncoordinatedWriteError: others wrote so much that this never had its turn.
            UsageError: what was given are no edits, or of children whom no path could name.
        """
        apply = NamesEdit(checked_edits(edits), self._writekey(), self._now)
        return await self._grid.modify(self.cap, apply, merge=_merge, redo=made_before)

    async def change_by(
        self, choose: Callable[[bytes], Sequence[Edit]], remembered: bytes | None = None
    ) -> tuple[bytes, WriteResult]:
        """
        Apply edits that are chosen by looking at what is there, in one publish.

        Args:
            choose: from the bytes of the directory to edits; called again if others have changed it.
            remembered: what the bytes were when this client saw them last, if it has kept them; see
                ``Grid.modify``.

        Returns:
            the bytes of the directory afterwards, and how they were written.

        Raises: as ``change`` does.
        """
        edit = ChosenEdit(choose, self._writekey(), self._now)
        written = await self._grid.modify(self.cap, edit, merge=_merge, remembered=remembered)
        return edit.result, written

    def applied(self, content: bytes, edits: Sequence[Edit]) -> bytes:
        """Return bytes of this directory with edits applied, without asking the grid."""
        return apply_edits(content, edits, self._writekey(), self._now())

    async def unlink_same(self, name: str, child: Child, must_exist: bool = False) -> bool:
        """
        Take a child out if it is still the one that was seen; returns whether it is out.

        Raises:
            NoSuchChild: somebody else has taken it out, and it must exist.
        """
        edit = TakeOutEdit(name, child.read_cap, must_exist, self._writekey())
        await self._grid.modify(self.cap, edit, merge=_merge)
        return not edit.kept

    def _writekey(self) -> bytes:
        check_writable(self.cap)
        assert isinstance(self.cap.file, MutableCap)
        return self.cap.file.secret


def check_writable(cap: Cap | None, about: str = "this directory") -> DirectoryCap:
    """
    Return the cap of a directory that it changes.

    Raises:
        CapError: it does not; the sentence says why.
    """
    if not isinstance(cap, DirectoryCap):
        raise CapError(f"{about} is no directory; only in one can names be changed")
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


async def create_directory(grid: ChangesFiles, format: str | None = None) -> Directory:
    """Store an empty directory; see ``Grid.create_directory``."""
    result = await grid.create_mutable(b"", format=format)
    return Directory(grid, DirectoryCap(result.cap))


def _merge(versions: Sequence[bytes]) -> bytes:
    return reduce(merge_directories, versions)

"""Copying local files and directories, or objects on the grid, into directories of a grid."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, writes
from pipegrid.core.mutable.directory_content_edits import Edit, Link
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.core.text import composed, printable
from pipegrid.errors import ChildExists, DirectoryError, PipegridError, SourceError, UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.transfer.put.source import open_spool
from pipegrid.tree.directory import Child, Directory, check_writable
from pipegrid.tree.file_metadata import entry_metadata, entry_name

MAX_DEPTH = 200
"""The maximum depth of a copied mutable directory, in levels."""

MAX_ITEMS = 100_000
"""The maximum number of entries of each local directory that is copied."""

_AT_ONCE = 16

CopyAction = Literal["new", "same", "over", "into"]
CopiedAs = Literal["linked", "copied", "overwritten", "same", "merged"]


@attrs.frozen(eq=False)
class Item:
    """
    Something to copy: a local path, or an object on the grid.

    Attributes:
        name: the name of the copy.
        label: the name of the original in messages.
        path: the local path, or None.
        child: the object on the grid, or None.
        follow: whether the target of a local symbolic link is copied, instead of the link.
    """

    name: str
    label: str
    path: str | None = None
    child: Child | None = None
    follow: bool = True

    @property
    def is_directory(self) -> bool:
        """Whether the item is a directory, or a link to one that is followed."""
        if self.child is not None:
            return self.child.kind == "directory"
        assert self.path is not None
        return os.path.isdir(self.path) and (self.follow or not os.path.islink(self.path))


@attrs.frozen
class CopyReports:
    """
    Callbacks of a copy.

    Attributes:
        done: called with an item, what was done with it, and its cap.
        failed: called with the label of an item, and why it was not copied; the copy continues with other
            items.
    """

    done: Callable[[Item, CopiedAs, Cap | None], None] = lambda item, how, cap: None
    failed: Callable[[str, Exception], None] = lambda label, error: None


def decide(item: Item, there: Child | None, force: bool) -> CopyAction:
    """
    Return what to do with an item.

    Args:
        there: the existing child with the name of the item, or None.

    Raises:
        ChildExists: the child must not be replaced.
    """
    if there is None:
        return "new"
    name = printable(item.name)
    if item.is_directory:
        if there.kind != "directory":
            raise ChildExists(
                f"a file '{name}' exists already; remove it first with 'pipegrid rm', or copy to another "
                "name",
                item.name,
            )
        if item.child is not None and item.child.read_cap == there.read_cap:
            return "same"
        if writes(there.cap):
            return "into"
    elif there.kind == "directory":
        raise ChildExists(
            f"a directory '{name}' exists already; remove it first with 'pipegrid rm -r', or copy to "
            "another name",
            item.name,
        )
    elif item.child is not None and item.child.read_cap == there.read_cap:
        return "same"
    elif isinstance(there.write_cap, MutableCap):
        return "over"
    if not force:
        raise ChildExists(
            f"'{name}' exists already; copy to another name, or replace it with -f", item.name
        )
    return "new"


class Copier:
    """
    One copy operation.

    Immutable objects are linked by their caps, and no bytes are sent. A mutable object is copied to a new
    immutable object with the present content, so later changes of the original do not change the copy. (In
    contrast, ``Directory.link`` gives the original a second name.) A directory is merged into an existing
    mutable directory of the same name. A file of the same name is replaced only with ``force``, except that a
    mutable file is always overwritten, and keeps its cap.

    All items are examined before anything is sent, and all new names in a directory are added by one publish.

    Args:
        put_tree: stores a local directory; returns its cap.
        force: whether files and immutable directories of the same names are replaced.
        calls: called with the sources of a ``put_many``; returns keyword arguments for it, such as callbacks.
    """

    def __init__(
        self,
        grid: Grid,
        put_tree: Callable[[str], Deferred[DirectoryCap]],
        reports: CopyReports | None = None,
        force: bool = False,
        calls: Callable[[Sequence[Any]], dict[str, Any]] = lambda sources: {},
    ) -> None:
        self._calls = calls
        self._grid = grid
        self._put_tree = put_tree
        self._reports = reports or CopyReports()
        self._force = force
        self._frozen: dict[bytes | None, Cap] = {}  # by storage index of the original
        self._partial: set[Cap] = set()

    async def into(self, directory: Directory, items: Sequence[Item], depth: int = 0) -> None:
        """
        Copy items into a directory; items that cannot be copied are reported.

        Raises:
            ChildExists: the name of the only item exists already.
            PipegridError: the directory could not be changed.
        """
        check_writable(directory.cap)
        there = await directory.list() if items else {}
        actions = self._actions(items, there, alone=len(items) == 1 and depth == 0)
        caps = await self._store([item for item in actions if actions[item] == "new"])
        edits: list[Edit] = [
            Link(item.name, cap, metadata=self._metadata(item), replace=self._force)
            for item, cap in caps.items()
        ]
        if edits:
            await directory.change(edits)
        for item, cap in caps.items():
            linked = item.child is not None and item.child.read_cap == cap
            self._reports.done(item, "linked" if linked else "copied", cap)
        for item, action in actions.items():
            old = there.get(composed(item.name))
            if action == "same":
                self._reports.done(item, "same", None if old is None else old.cap)
            elif action == "over":
                assert old is not None
                await self._trying(item.label, self.over(item, old.write_cap))
            elif action == "into":
                assert old is not None
                await self._trying(item.label, self._merge(item, old, depth))

    def _actions(
        self, items: Sequence[Item], there: Mapping[str, Child], alone: bool
    ) -> dict[Item, CopyAction]:
        """
        Return what to do with each item. An item that cannot be copied is reported and left out or, if it is
        ``alone``, its error is raised.
        """
        actions: dict[Item, CopyAction] = {}
        labels: dict[str, str] = {}
        for item in items:
            name = composed(item.name)
            try:
                if name in labels:
                    raise UsageError(
                        f"{printable(labels[name])} and {printable(item.label)} would both be called "
                        f"'{printable(name)}'; copy them one after the other, to different names"
                    )
                actions[item] = decide(item, there.get(name), self._force)
                labels[name] = item.label
            except UsageError as error:
                if alone:
                    raise
                self._reports.failed(item.label, error)
        return actions

    async def over(self, item: Item, cap: Cap | None) -> None:
        """
        Overwrite a mutable file with the content of an item.

        Raises:
            PipegridError: reading or writing failed.
        """
        assert isinstance(cap, MutableCap)
        if item.path is not None:
            await self._grid.overwrite(cap, item.path)
        else:
            assert item.child is not None
            async with self._spooled(item.child) as spool:
                await self._grid.overwrite(cap, spool)
        self._reports.done(item, "overwritten", cap)

    async def _merge(self, item: Item, there: Child, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise DirectoryError(f"directories are more than {MAX_DEPTH} levels deep")
        assert isinstance(there.cap, DirectoryCap)
        inner = await self.items_in(item)
        await self.into(Directory(self._grid, there.cap), inner, depth + 1)
        self._reports.done(item, "merged", there.cap)

    async def items_in(self, item: Item) -> list[Item]:
        """Return the content of a directory as items."""
        if item.path is not None:
            return local_items(item.path, item.label)
        assert item.child is not None
        assert isinstance(item.child.cap, DirectoryCap)
        children = await Directory(self._grid, item.child.cap).list()
        return [Item(name, f"{item.label}/{name}", None, each) for name, each in children.items()]

    # The methods below return the caps of the copies.

    async def _store(self, items: Sequence[Item]) -> dict[Item, Cap]:
        """
        Store items, and return the caps of those that were stored, in the same order; failures are reported.
        """
        caps: dict[Item, Cap] = {}
        files = {item for item in items if item.path is not None and not item.is_directory}
        sources = await self._sources([item for item in items if item in files])
        given = list(sources.values())
        outcomes = await self._grid.put_many(given, **self._calls(given)) if given else []
        for item, outcome in zip(sources, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._reports.failed(item.label, outcome.value)  # type: ignore[arg-type]
            else:
                caps[item] = outcome.cap

        async def other(item: Item) -> None:
            if item.path is not None:
                caps[item] = await self._put_tree(item.path)
            else:
                assert item.child is not None
                caps[item] = await self.frozen(item.child, item.label)

        steps = [
            lambda item=item: self._trying(item.label, other(item))
            for item in items
            if item not in files
        ]
        await few_at_a_time(_AT_ONCE, steps)
        return {item: caps[item] for item in items if item in caps}

    async def _sources(self, items: Sequence[Item]) -> dict[Item, Any]:
        sources: dict[Item, Any] = {}
        for item in items:
            assert item.path is not None
            try:
                found = os.stat(item.path, follow_symlinks=item.follow)
                if stat.S_ISLNK(found.st_mode):
                    sources[item] = os.fsencode(os.readlink(item.path))
                elif stat.S_ISREG(found.st_mode):
                    sources[item] = item.path
                else:
                    raise SourceError("it is not a file, and has no content to store; leave it out")
            except OSError as error:
                failed = SourceError(f"it cannot be read: {error.strerror}; check the path")
                self._reports.failed(item.label, failed)
            except SourceError as error:
                self._reports.failed(item.label, error)
        return sources

    def _metadata(self, item: Item) -> dict[str, Any]:
        if item.child is not None:
            return dict(item.child.metadata)
        assert item.path is not None
        try:
            found = os.stat(item.path, follow_symlinks=item.follow)
            link = os.fsencode(os.readlink(item.path)) if stat.S_ISLNK(found.st_mode) else None
        except OSError:
            return {}  # the file was deleted after it was stored
        raw_name = os.fsencode(os.path.basename(os.path.abspath(item.path)))
        return entry_metadata(found, link=link, name=entry_name(raw_name)[1])

    async def frozen(
        self, child: Child, label: str, above: frozenset[bytes | None] = frozenset()
    ) -> Cap:
        """
        Return the cap of an immutable copy of an object. Each directory is copied only once, since a tree of
        thirty directories can have a billion paths.

        Args:
            above: storage indexes of the directories around the object.

        Raises:
            UsageError: the object is of an unknown kind.
            DirectoryError: a directory contains itself, or is nested too deeply.
            PipegridError: the grid failed.
        """
        cap = child.cap
        file = cap.file if isinstance(cap, DirectoryCap) else cap
        if child.kind == "unknown" or cap is None:
            raise UsageError("no read cap of it is known, so it cannot be copied; link it instead")
        if isinstance(file, (ChkCap, LitCap)):
            return cap
        if not isinstance(cap, DirectoryCap):
            async with self._spooled(child) as spool:
                return (await self._grid.put(spool)).cap
        index = cap.storage_index
        if index in above or len(above) >= MAX_DEPTH:
            raise DirectoryError(
                f"it contains itself, or is more than {MAX_DEPTH} levels deep; copy what is in it one by one"
            )
        if index in self._frozen:
            if self._frozen[index] in self._partial:
                incomplete = DirectoryError("a part of it could not be copied, as reported before")
                self._reports.failed(label, incomplete)
            return self._frozen[index]
        children = await Directory(self._grid, cap).list()
        caps: dict[str, Cap] = {}

        async def freeze(each: Child, inner: str) -> None:
            caps[each.name] = await self.frozen(each, inner, above | {index})

        for name, each in children.items():
            inner = f"{label}/{name}"
            await self._trying(inner, freeze(each, inner))
        packed = pack_immutable(
            PackedChild(name, inner_cap, _without_times(children[name].metadata))
            for name, inner_cap in caps.items()
        )
        self._frozen[index] = made = directory_cap((await self._grid.put(packed)).cap)
        if len(caps) < len(children) or not self._partial.isdisjoint(caps.values()):
            self._partial.add(made)
        return made

    @asynccontextmanager
    async def _spooled(self, child: Child) -> AsyncIterator[Any]:
        assert child.cap is not None
        with open_spool("it") as spool:
            await self._grid.get(child.cap, spool)
            spool.seek(0)
            yield spool

    async def _trying(self, label: str, work: Any) -> None:
        try:
            await work
        except PipegridError as error:
            self._reports.failed(label, error)


def local_items(path: str, label: str) -> list[Item]:
    """
    Return the content of a local directory; symbolic links are not followed.

    Raises:
        SourceError: the directory cannot be read.
        UsageError: the directory has too many entries.
    """
    items: list[Item] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if len(items) >= MAX_ITEMS:
                    raise UsageError(
                        f"{printable(label)} has more than {MAX_ITEMS} entries; copy a part of it"
                    )
                name = entry_name(os.fsencode(entry.name))[0]
                items.append(Item(name, f"{label}/{entry.name}", entry.path, follow=False))
    except OSError as error:
        raise SourceError(f"cannot read {printable(path)}: {error.strerror}") from error
    return sorted(items, key=lambda item: item.name)


def _without_times(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata without the times of linking, which entries of immutable directories must not have."""
    return {key: value for key, value in metadata.items() if key != "tahoe"}

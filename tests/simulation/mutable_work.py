"""
What writers do to one mutable file in a schedule of faults, and what may be there then.

Each kind of work knows what was asked for, what was acknowledged, and so what a reader may find. A change
that failed may have been made all the same, then or later: both outcomes are allowed, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import (
    Edit,
    Link,
    Rename,
    SetMetadata,
    Unlink,
    unpack_entries,
)
from pipegrid.errors import ChildExists, NoSuchChild
from pipegrid.transfer.mutable.mutable_files import MutableFiles
from pipegrid.transfer.mutable.publish import WriteResult
from pipegrid.tree.directory import Directory


class Broken(AssertionError):
    """A promise was broken; the text says which."""


Change = tuple[Deferred[Any], Callable[[BaseException | None, float], None]]
"""A change that has begun, and who is told how it ended, None if it was acknowledged, and when."""


class Work:
    """
    Base of all kinds.

    Args:
        writers: how many there are; each changes what is its own.
        filler: bytes of content that nobody changes.

    Attributes:
        first: content that the file is made with.
        returned: how often an acknowledged removal was undone, where two versions were made one.
    """

    first: bytes = b""
    returned = 0

    def __init__(self, random: Random, writers: int, filler: int) -> None:
        self.random = random
        self.writers = writers
        self.filler = filler

    async def prepare(self, files: MutableFiles, cap: MutableCap) -> None:
        """Bring the file into the state that it begins with."""

    def ask(
        self, files: MutableFiles, cap: MutableCap, writer: int, number: int, now_s: float
    ) -> Change:
        """Begin a writer's next change."""
        raise NotImplementedError

    def look(self, content: bytes, final: bool) -> None:
        """
        Raise Broken if this cannot be there.

        Args:
            final: all servers are back; else somebody reads while faults go on, and may see what is old.
        """
        raise NotImplementedError


def add(word: str) -> Callable[[bytes], bytes]:
    """Return an edit that puts a word among the others, once."""

    def edit(old: bytes) -> bytes:
        head, _, tail = old.partition(b"\n")
        words = {*head.decode("ascii").split(), word}
        return " ".join(sorted(words)).encode("ascii") + b"\n" + tail

    return edit


class Words(Work):
    """Each change adds a word (``modify``)."""

    def __init__(self, random: Random, writers: int, filler: int) -> None:
        super().__init__(random, writers, filler)
        self.tail = bytes(filler)
        self.first = b"\n" + self.tail
        self.asked: set[str] = set()
        self.acknowledged: set[str] = set()

    def ask(
        self, files: MutableFiles, cap: MutableCap, writer: int, number: int, now_s: float
    ) -> Change:
        """See ``MirrorRun``."""
        word = f"w{writer}c{number}"
        self.asked.add(word)

        def ended(error: BaseException | None, at_s: float) -> None:
            if error is None:
                self.acknowledged.add(word)

        return files.modify(cap, add(word)), ended

    def look(self, content: bytes, final: bool) -> None:
        """See ``MirrorRun``."""
        head, _, tail = content.partition(b"\n")
        words = set(head.decode("ascii").split())
        if final and (lost := self.acknowledged - words):
            raise Broken(f"acknowledged, and lost: {sorted(lost)}; there are {sorted(words)}")
        if invented := words - self.asked:
            raise Broken(f"nobody asked for {sorted(invented)}")
        if tail != self.tail:
            raise Broken("what nobody changed has changed")


@attrs.define
class _Value:
    content: bytes
    began_s: float
    ended_s: float = float("inf")
    acknowledged: bool = False


class Contents(Work):
    """Each change replaces everything (``overwrite``)."""

    def __init__(self, random: Random, writers: int, filler: int) -> None:
        super().__init__(random, writers, filler)
        self.first = b"first" + bytes(filler)
        self.values = [_Value(self.first, -1.0, -1.0, True)]

    def ask(
        self, files: MutableFiles, cap: MutableCap, writer: int, number: int, now_s: float
    ) -> Change:
        """See ``MirrorRun``."""
        value = _Value(f"w{writer}c{number}:".encode() + bytes(self.filler), now_s)
        self.values.append(value)

        def ended(error: BaseException | None, at_s: float) -> None:
            value.acknowledged = error is None
            # What has failed may still be on its way to servers.
            value.ended_s = at_s if error is None else float("inf")

        return Deferred.fromCoroutine(files.overwrite(cap, value.content)), ended

    def look(self, content: bytes, final: bool) -> None:
        """See ``MirrorRun``: no value is there that ended before one that is acknowledged began."""
        found = next((value for value in self.values if value.content == content), None)
        if found is None:
            raise Broken(f"nobody wrote {content[:20]!r}")
        for value in self.values if final else ():
            if value.acknowledged and value.began_s > found.ended_s:
                raise Broken(
                    f"{value.content[:8]!r} was acknowledged, and {found.content[:8]!r} is there"
                )


class Ranges(Work):
    """Each writer has a range of its own, and writes all of it again and again (``update``)."""

    length = 2000

    def __init__(self, random: Random, writers: int, filler: int) -> None:
        super().__init__(random, writers, filler)
        self.stride = max(self.length, filler // writers)
        self.first = b"x" * (self.stride * writers)
        self.possible = [{b"x" * self.length} for _ in range(writers)]
        self.ever = [{b"x" * self.length} for _ in range(writers)]

    def ask(
        self, files: MutableFiles, cap: MutableCap, writer: int, number: int, now_s: float
    ) -> Change:
        """See ``MirrorRun``."""
        value = f"w{writer}c{number}:".encode().ljust(self.length, b".")
        self.ever[writer].add(value)

        def ended(error: BaseException | None, at_s: float) -> None:
            before = self.possible[writer]
            self.possible[writer] = {value} if error is None else before | {value}

        waiting = files.update(cap, writer * self.stride, value)
        return Deferred.fromCoroutine(waiting), ended

    def look(self, content: bytes, final: bool) -> None:
        """See ``MirrorRun``."""
        if len(content) != len(self.first):
            raise Broken(f"{len(content)} bytes are there, and {len(self.first)} were")
        for writer, values in enumerate(self.possible if final else self.ever):
            at = writer * self.stride
            if content[at : at + self.length] not in values:
                raise Broken(f"the range of writer {writer} has {content[at : at + 10]!r}")
            if content[at + self.length : at + self.stride].strip(b"x"):
                raise Broken("what nobody changed has changed")


State = frozenset[tuple[str, str]]
"""Names of one writer's, and their caps."""


@attrs.define
class _Asked:
    edits: Sequence[Edit]
    ended: bool = False
    error: BaseException | None = None


class Names(Work):
    """Each writer links, unlinks and renames what is its own, in one directory."""

    def __init__(self, random: Random, writers: int, filler: int) -> None:
        super().__init__(random, writers, filler)
        self.possible: list[set[State]] = [{frozenset()} for _ in range(writers)]
        self.ever = {(f"filler{n}", str(LitCap(b"%d" % n))) for n in range(min(filler // 100, 200))}
        self.fixed = frozenset(self.ever)
        self.removed: set[str] = set()
        self.unclear: set[int] = set()
        self.in_flight: list[list[_Asked]] = [[] for _ in range(writers)]

    async def prepare(self, files: MutableFiles, cap: MutableCap) -> None:
        """Put the children there that nobody changes."""
        if self.fixed:
            edits = [Link(name, LitCap(name[6:].encode())) for name, _ in sorted(self.fixed)]
            await self._directory(files, cap, 0.0).change(edits)

    def _directory(self, files: MutableFiles, cap: MutableCap, now_s: float) -> Directory:
        grid: Any = _Files(files)
        return Directory(grid, DirectoryCap(cap), lambda: now_s)

    def ask(
        self, files: MutableFiles, cap: MutableCap, writer: int, number: int, now_s: float
    ) -> Change:
        """See ``MirrorRun``."""
        edits = self._edits(writer, number)
        for edit in edits:
            if isinstance(edit, Link):
                self.ever.add((edit.name, str(edit.cap)))
            elif isinstance(edit, Rename):
                self.ever |= {(edit.new, cap) for name, cap in self.ever if name == edit.old}

        asked, in_flight = _Asked(edits), self.in_flight[writer]
        in_flight.append(asked)

        def ended(error: BaseException | None, at_s: float) -> None:
            asked.ended, asked.error = True, error
            # They are made in the order in which they were asked for: one that was given up may be in what
            # another that was asked for before it is still writing.
            while in_flight and in_flight[0].ended:
                first = in_flight.pop(0)
                self._ended(writer, first.edits, first.error)

        return self._directory(files, cap, now_s).change(edits), ended

    def _edits(self, writer: int, number: int) -> list[Edit]:
        random = self.random
        names = [f"w{writer}n{n}" for n in range(3)]
        edits: list[Edit] = []
        for each in range(random.choice((1, 1, 1, 2))):
            name, other = random.sample(names, 2)
            flag = random.random() < 0.5
            link = Link(name, LitCap(f"w{writer}c{number}e{each}".encode()), replace=flag)
            edits.append(random.choice((link, link, Unlink(name, flag), Rename(name, other, flag))))
        return edits

    def _ended(self, writer: int, edits: Sequence[Edit], error: BaseException | None) -> None:
        before = self.possible[writer]
        touched = {getattr(edit, "old", getattr(edit, "name", "")) for edit in edits}
        if isinstance(error, NoSuchChild | ChildExists):
            after = {state for state in before if _applied(state, edits, False) is None}
            if not after:
                self._unexpected(writer, edits, error)
                after = before
        else:
            made = {_applied(state, edits, repeated) for state in before for repeated in (0, 1)}
            after = {state for state in made if state is not None}
            if error is not None:
                after |= before
            elif not after:
                self._unexpected(writer, edits, error)
                after = before
            else:
                self.removed |= {
                    name for name in touched if any(name not in dict(state) for state in after)
                }
        self.possible[writer] = after

    def _unexpected(self, writer: int, edits: Sequence[Edit], error: BaseException | None) -> None:
        """Only where what was removed may have come back is more possible than was followed here."""
        names = {getattr(edit, part, "") for edit in edits for part in ("name", "old", "new")}
        if not self.removed & names:
            states = self.possible[writer]
            raise Broken(f"{edits} ended with {error!r}, and {states} are possible")
        self.unclear.add(writer)

    def look(self, content: bytes, final: bool) -> None:
        """See ``MirrorRun``."""
        found = {(name, str(entry.read_cap)) for name, entry in unpack_entries(content).items()}
        if invented := found - self.ever:
            raise Broken(f"nobody asked for {sorted(invented)}")
        if not final:
            return
        if lost := self.fixed - found:
            raise Broken(f"what nobody changed is gone: {sorted(lost)}")
        for writer, states in enumerate(self.possible):
            if writer in self.unclear:
                continue
            own = {entry for entry in found if entry[0].startswith(f"w{writer}n")}
            extra = [
                own - state
                for state in states
                if state <= own and {name for name, _ in own - state} <= self.removed
            ]
            if not extra:
                raise Broken(f"writer {writer} has {sorted(own)}, and {states} are possible")
            self.returned += min(map(len, extra))


def _applied(state: State, edits: Sequence[Edit], repeated: bool | int) -> State | None:
    """
    Return what edits make of a state, or None if they must fail; as ``core.mutable.directory_content_edits``
    says it.
    """
    there = dict(state)
    for edit in edits:
        assert not isinstance(edit, SetMetadata)  # writers use none
        if isinstance(edit, Link):
            cap = str(edit.cap)
            if (
                edit.name in there
                and not edit.replace
                and not (repeated and there[edit.name] == cap)
            ):
                return None
            there[edit.name] = cap
        elif isinstance(edit, Unlink):
            if there.pop(edit.name, None) is None and edit.must_exist and not repeated:
                return None
        elif edit.old not in there:
            if not (repeated and edit.new in there):
                return None
        elif edit.new in there and not edit.replace:
            return None
        else:
            there[edit.new] = there.pop(edit.old)
    return frozenset(there.items())


class _Files:
    """What changing a directory needs of a grid."""

    def __init__(self, files: MutableFiles) -> None:
        self._files = files

    def modify(
        self, cap: Cap, function: Any, *, merge: Any = None, redo: Any = None
    ) -> Deferred[WriteResult]:
        """Apply a function to a directory's content."""
        assert isinstance(cap, DirectoryCap)
        assert isinstance(cap.file, MutableCap)
        return self._files.modify(cap.file, function, merge, redo)

    def read(self, cap: Any, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Not needed here."""
        raise NotImplementedError

    def create_mutable(self, source: Any, *, format: str = "sdmf") -> Any:
        """Not needed here."""
        raise NotImplementedError


KINDS: dict[str, type[Work]] = {
    "words": Words,
    "names": Names,
    "ranges": Ranges,
    "contents": Contents,
}

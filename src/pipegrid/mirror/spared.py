"""
What stays of a Debian archive though a run does not name it: suites and indexes that other runs keep in the
same directory, and what the indexes of the generation before name.

Whoever has just read an old release file finds its indexes by hash, for a generation more: what they name has
to be there as long. And several runs may share a directory, each with its suites, or with components or
architectures of one suite: none removes what another one brought. What is to go has no index any more.

Synchronous, for the thread that has the destination.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from pipegrid.errors import UsageError
from pipegrid.mirror import compressed
from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, read_release
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.folding import holder
from pipegrid.mirror.indexes import by_hash
from pipegrid.mirror.manifest import read_manifest
from pipegrid.mirror.selecting import HELD, READ, Index, base_of, named_by, names_packages
from pipegrid.mirror.suites import OWN, Suite, remove_in_order, unsigned_part
from pipegrid.mirror.wanted import BadEntry, MirrorError, Wanted

_OF_INDEXES = ("binary-", "source")
"""What directories are called whose ``Release`` says what is beside it, and is none of a suite."""


def kept_apart(
    destination: Destination, suites: Iterable[Suite], indexes: Sequence[Index]
) -> list[Index]:
    """
    Return the indexes of these suites that other runs keep here, and that the new release files name so.

    What the last run kept together with some that are chosen now, and is not chosen any more, is no other
    run's: it is not wanted any more.

    Raises:
        UsageError: a release file says something else of one, of which its readers would be told that it is
            wrong.
    """
    chosen = {base_of(form.path) for index in indexes for form in index.forms}
    found = []
    last: set[str] | None = None
    for suite in suites:
        for base, forms in _bases(suite, chosen).items():
            here = _forms_here(destination, suite, base, forms)
            if not here:
                continue
            if last is None:
                last = _kept_by_last_run(destination)
            if suite.place(base) in last and not last.isdisjoint(chosen):
                continue
            named = suite.release.files
            if any(named.get(form.path) != form for form in here):
                raise _would_be_wrong(destination, suite, here[0].path)
            placed = [form.but(path=suite.place(form.path)) for form in here]
            found.append(Index(suite, _kind(base), placed))
    return found


def _would_be_wrong(destination: Destination, suite: Suite, name: str) -> UsageError:
    path = suite.place(name)
    together, gone = "component and architecture", os.path.dirname(path)
    if suite.is_flat and names_packages(name):
        together, gone = "sources" if "Sources" in name else "packages", path
    return UsageError(
        f"{destination.path} also holds {path}, which the new release file changes; have its"
        f" {together} mirrored in the same run, or remove {gone} if it is to go"
    )


def _kept_by_last_run(destination: Destination) -> set[str]:
    """Return the indexes that the last complete run kept."""
    with suppress(MirrorError, BadEntry):
        return {
            base_of(each.path) for each in read_manifest(destination) if names_packages(each.path)
        }
    return set()


def _bases(suite: Suite, chosen: set[str]) -> dict[str, list[Wanted]]:
    """Return the indexes that the release file here names, the new one does, too, and nobody chose."""
    found: dict[str, list[Wanted]] = {}
    named = suite.release.files
    for path, form in suite.before.files.items() if suite.before is not None else ():
        if names_packages(path):
            base = base_of(path)
            if suite.place(base) not in chosen:
                found.setdefault(base, []).append(form)
    return {
        base: forms
        for base, forms in found.items()
        if any(base + ending in named for ending in READ)
    }


def _forms_here(
    destination: Destination, suite: Suite, base: str, forms: Iterable[Wanted]
) -> list[Wanted]:
    """Return which forms of an index are here; of one that was compressed here, what is in it."""
    if not os.path.isdir(destination.where(os.path.dirname(suite.place(base)))):
        return []
    here = []
    for form in forms:
        placed = form.but(path=suite.place(form.path))
        if destination.is_there(placed) or (
            form.path == base and compressed.find(destination, placed, staged=False) is not None
        ):
            here.append(form)
    return here


def _kind(base: str) -> Literal["packages", "sources"]:
    return "packages" if base.endswith("Packages") else "sources"


def remove_others(
    destination: Destination, kept: Iterable[str], spared: Spared, dry_run: bool = False
) -> list[str]:
    """
    Remove all files but those of these paths, and what else is spared; returns them.

    Args:
        dry_run: only tell.

    Raises:
        MirrorError: it cannot be told what else is named here; nothing is removed.
    """
    others = list(destination.others(frozenset(kept)))
    if others:  # only then it is worth it to read what others name
        stays = holder(spared.names(others), destination.folds)
        others = [path for path in others if not stays(path)]
    if not dry_run:
        remove_in_order(destination, others)
    return others


class Spared:
    """
    Tells what stays.

    Args:
        suites, indexes: what the run has mirrored.
        apart: as ``kept_apart`` returned it.
    """

    def __init__(
        self,
        destination: Destination,
        suites: Sequence[Suite],
        indexes: Sequence[Index],
        apart: Sequence[Index],
    ) -> None:
        self._destination = destination
        self._suites = suites
        self._indexes = indexes
        self._apart = apart

    def names(self, paths: Sequence[str]) -> Iterator[str]:
        """
        Yield what stays of some files that are here; and other paths, too.

        Raises:
            MirrorError: what is there cannot be read.
        """
        for index in self._indexes:
            old = self._before(index)
            if old is not None:
                with suppress(BadEntry):  # it is of no use to anybody
                    yield from (each.path for each in named_by(self._destination, old))
        own = {_component_of(index.path) for index in self._indexes if index.kind}
        for index in self._apart:
            # With all that is beside it, where the component is not of this run.
            component = _component_of(index.path)
            above = os.path.dirname(index.path) if component in own else component
            if index.suite.is_flat:
                yield from _forms_of(index, paths)
            else:
                yield from (path for path in paths if path.startswith(f"{above}/"))
            yield from self._named(index)
        stay = {suite.directory for suite in self._suites}
        for suite in self._other_suites(paths):
            stay.add(suite.directory)
            below = _belonging(suite, paths)
            yield from below
            for index in _indexes_of(suite, below):
                yield from self._named(index)
                for old in self._by_hash(index, below):
                    with suppress(BadEntry, OSError):  # as above
                        yield from (each.path for each in named_by(self._destination, old))
        yield from (path for path in paths if self._leads_to(path) in stay)

    def _leads_to(self, path: str) -> str | None:
        """Return which suite a link beside it leads to, such as ``stable``; debmirror makes such links."""
        where = self._destination.where(path)
        if os.path.dirname(path) != "dists" or not os.path.islink(where):
            return None
        return f"dists/{os.path.normpath(os.readlink(where))}"

    def _before(self, index: Index) -> Index | None:
        """Return an index as it was, if it stays by hash and is another one."""
        suite = index.suite
        before = suite.before
        if before is None or not before.by_hash or index.kind not in ("packages", "sources"):
            return None
        for form in index.forms:
            old = before.files.get(suite.within(form.path))
            name = None if old is None else by_hash(form.path, old)
            if old is None or name is None:
                continue
            if old.digest == form.digest:
                return None
            if self._destination.is_there(old.but(path=name, remote=None)):
                return Index(suite, index.kind, [old.but(path=name, remote=None)])
        return None

    def _by_hash(self, index: Index, paths: Iterable[str]) -> Iterator[Index]:
        """Yield the last indexes of before that are beside one, by hash: a generation in all its forms."""
        above = os.path.join(os.path.dirname(index.path), "by-hash", "")
        now = {form.digest.hex() for form in index.suite.release.files.values()}
        old = [
            path for path in paths if path.startswith(above) and path.rpartition("/")[2] not in now
        ]
        old.sort(key=lambda path: -os.lstat(self._destination.where(path)).st_mtime_ns)
        # Those of a flat suite's packages and sources are together; what is none of this kind says so.
        for path in old[: 2 * len(HELD) if index.suite.is_flat else len(HELD)]:
            yield Index(index.suite, index.kind, [Wanted(path, None, "sha256", b"")])

    def _named(self, index: Index) -> Iterator[str]:
        path = index.path
        if not os.path.lexists(self._destination.where(path)):
            index.forms[0] = index.forms[0].but(path=path + compressed.ENDING)
        try:
            for each in named_by(self._destination, index):
                yield each.path
        except (BadEntry, OSError) as error:
            raise _unreadable(path, error) from error

    def _other_suites(self, paths: Sequence[str]) -> Iterator[Suite]:
        """Yield the suites that are not of this run, each once, by their release files."""
        own = {suite.directory for suite in self._suites}
        for path in paths:
            above, _, name = path.rpartition("/")
            if name not in ("InRelease", "Release") or above in own:
                continue
            is_flat = not path.startswith("dists/")
            data = self._destination.read(path, MAX_RELEASE_BYTES)
            try:
                release = read_release(unsigned_part(data or b""), path)
            except BadEntry as error:
                if os.path.basename(above).startswith(_OF_INDEXES):
                    continue
                if is_flat and not any(
                    names_packages(each) and os.path.dirname(each) == above for each in paths
                ):
                    continue  # no suite, but a file that happens to be called so
                raise _unreadable(path, error) from error
            own.add(above)
            yield Suite(above, release, {}, None, is_flat)


def _belonging(suite: Suite, paths: Iterable[str]) -> list[str]:
    """Return what belongs to another run's suite, but for what its indexes name."""
    if not suite.is_flat:
        return [path for path in paths if path.startswith(f"{suite.directory}/")]
    found = []
    for path in paths:
        if path == suite.place(suite.within(path)):
            name = suite.within(path)
            base = base_of(name)
            if (
                name in OWN
                or name in suite.release.files
                or base in ("Packages", "Sources")
                or name.startswith(("by-hash/", "Packages.diff/", "Sources.diff/"))
            ):
                found.append(path)
    return found


def _forms_of(index: Index, paths: Iterable[str]) -> Iterator[str]:
    """Yield what is there of a flat suite's index: its forms, and these by hash."""
    base = base_of(index.path)
    named = index.suite.release.files.values()
    by_hashes = {by_hash(index.path, form) for form in named}
    for path in paths:
        if path in by_hashes or (names_packages(path) and base_of(path) == base):
            yield path


def _component_of(path: str) -> str:
    return os.path.dirname(os.path.dirname(path))


def _indexes_of(suite: Suite, paths: Iterable[str]) -> Iterator[Index]:
    """Yield the indexes that are here of a suite that is not this run's."""
    best: dict[str, int] = {}
    for path in paths:
        if names_packages(path) and "/by-hash/" not in path:
            base = base_of(path)
            ending = path[len(base) :]
            if ending in READ:
                best[base] = min(best.get(base, len(READ)), READ.index(ending))
    for base, number in best.items():
        yield Index(suite, _kind(base), [Wanted(base + READ[number], None, "sha256", b"")])


def _unreadable(path: str, error: Exception) -> MirrorError:
    return MirrorError(
        f"{path} cannot be read ({error}), so that nobody knows what else is to stay; nothing was removed:"
        " mirror it, or remove it if it is to go"
    )

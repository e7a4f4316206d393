"""The files of a Debian archive that are kept although a run does not name them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from pipegrid.mirror import debian_index_update
from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    holder,
)
from pipegrid.mirror.debian_index_selection import (
    HELD,
    READ,
    Index,
    KeptForm,
    base_of,
    below,
    further_index,
    hashed_names,
    ignore_entry,
    index_of,
    named_by,
    names_packages,
)
from pipegrid.mirror.debian_index_update import by_hash
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.debian_release_files import (
    OWN,
    Suite,
    remove_in_order,
    unsigned_part,
)
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.manifest import read_manifest

# The files of a Debian archive that are kept although a run does not name them: suites and indexes of other
# runs in the same destination, and files that the previous version's indexes name.
#
# A client that has just read the previous release file still fetches the previous indexes by hash, and the
# files that these name. So the previous indexes and their files are kept for one more version. Several runs
# may share a destination, each with its suites, or with components or architectures of one suite: no run
# removes files of another. Only files that no index names are removed.
#
# The code is synchronous, for the destination's thread.

_OF_INDEXES = ("binary-", "source")
"""Name prefixes of directories whose ``Release`` describes the index next to it, and not a suite."""


def kept_apart(
    destination: Destination,
    suites: Iterable[Suite],
    indexes: Sequence[Index],
    deletes: bool = False,
) -> list[Index]:
    """
    Return the indexes of these suites that other runs keep in the destination, as the new release files name
    them.

    All runs share the release file, so a run that publishes a new one also updates the indexes of other runs:
    otherwise these would not match the release file, and clients would reject them. If the last run kept an
    index together with all indexes of this run, the selection has become smaller: the index is not another
    run's, and is not returned. If this run ``deletes`` unwanted files, other files in the directory of a
    selected component, such as translations, are not returned either.
    """
    taken = {_key(form.path) for index in indexes for form in index.forms}
    chosen = {path for path in taken if names_packages(path)}
    own = tuple({f"{_component_of(index.path)}/" for index in indexes if index.kind})
    found = []
    last: set[str] | None = None
    for suite in suites:
        for index in _here(destination, suite, taken):
            if last is None:
                last = _kept_by_last_run(destination)
            if not names_packages(index.path):
                if deletes and index.path.startswith(own):
                    continue
            elif base_of(index.path) in last and chosen <= last:
                continue
            found.append(index)
    return found


def _key(path: str) -> str:
    """Return the part of an index's path that all its forms share; the whole path of any other file."""
    return base_of(path) if names_packages(path) else path


def _kept_by_last_run(destination: Destination) -> set[str]:
    """Return the indexes of packages and sources that the last complete run kept, without endings."""
    with suppress(MirrorError, BadEntry):
        return {
            base_of(each.path) for each in read_manifest(destination) if names_packages(each.path)
        }
    return set()


def _here(destination: Destination, suite: Suite, taken: set[str]) -> Iterator[Index]:
    """
    Yield the existing indexes of a suite that both the previous and the new release file name and that are
    not in ``taken``.
    """
    named = suite.release.files
    done = set(taken)
    for path in suite.before.files if suite.before is not None else ():
        place = suite.place(path)
        key = _key(place)
        if key in done or path in OWN:
            continue
        if not names_packages(path):
            if path in named and _is_here(destination, place):
                yield further_index(suite, below(suite, named[path]))
            continue
        done.add(key)
        base = suite.within(key)
        held, endings = held_here(destination, key, suite.before)
        if held is not None and any(base + ending in named for ending in READ):
            yield index_of(suite, _kind(base), base, held if base in named else "packed", endings)


def held_here(
    destination: Destination, base: str, before: Release | None
) -> tuple[KeptForm | None, list[str]]:
    """
    Return the form in which an index is kept in the destination, None if it is not kept; and the endings of
    the existing packed files.
    """
    if not os.path.isdir(destination.where(os.path.dirname(base))):
        return None, []
    endings = [ending for ending in READ if _is_here(destination, base + ending)]
    packed = [ending for ending in endings if ending]
    if packed == [debian_index_update.ENDING] and debian_index_update.is_noted(destination, base):
        return "zstd", endings
    if not endings:
        return None, []
    return ("packed" if packed else "unpacked"), packed


def _is_here(destination: Destination, path: str) -> bool:
    return os.path.lexists(destination.where(path))


def _kind(base: str) -> Literal["packages", "sources"]:
    return "packages" if base.endswith("Packages") else "sources"


def remove_others(
    destination: Destination, kept: Iterable[str], retained: RetainedFiles, dry_run: bool = False
) -> list[str]:
    """
    Remove all files except ``kept`` and the retained ones; return the removed paths.

    Args:
        dry_run: remove nothing; return what would be removed.

    Raises:
        MirrorError: an index of another run cannot be read, so the files that it needs are unknown; nothing
            is removed.
    """
    others = list(destination.others(frozenset(kept)))
    if others:  # without other files, the indexes of other runs need not be read
        stays = holder(retained.names(others), destination.folds)
        others = [path for path in others if not stays(path)]
    if not dry_run:
        remove_in_order(destination, others)
    return others


class RetainedFiles:
    """
    Finds the files that a run does not name, but that must be kept.

    Args:
        suites, indexes: what the run has mirrored.
        apart: the result of ``kept_apart``.
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
        Yield the paths that must be kept; some of them may not be in ``paths``.

        Raises:
            MirrorError: an existing index cannot be read.
        """
        for index in self._indexes:
            old = self._before(index)
            if old is not None:
                old.stays = index.stays
                with suppress(BadEntry):  # an unreadable index is not needed
                    yield from (each.path for each in named_by(self._destination, old, stays=True))
        apart = {index.path for index in self._apart}
        own = {_component_of(i.path) for i in self._indexes if i.kind and i.path not in apart}
        for index in self._apart:
            if not index.kind:
                continue
            # Keep all files of a component that only other runs keep; of a shared component, keep the files
            # in the index's directory.
            component = _component_of(index.path)
            above = os.path.dirname(index.path) if component in own else component
            if index.suite.is_flat:
                yield from _forms_of(index, paths)
            else:
                # Names by hash are left out, since the run itself keeps those of the current and previous
                # version.
                yield from (p for p in paths if p.startswith(f"{above}/") and "/by-hash/" not in p)
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
        """
        Return the suite that a link in ``dists`` leads to, such as the link ``stable``; debmirror makes such
        links. None if the path is no such link.
        """
        where = self._destination.where(path)
        if os.path.dirname(path) != "dists" or not os.path.islink(where):
            return None
        return f"dists/{os.path.normpath(os.readlink(where))}"

    def _before(self, index: Index) -> Index | None:
        """
        Return the previous version of an index; None if its content is the same, or is not kept by hash.
        """
        suite = index.suite
        before = suite.before
        if before is None or not before.by_hash or index.kind not in ("packages", "sources"):
            return None
        for form in index.forms:
            old = before.files.get(suite.within(form.path))
            name = None if old is None else by_hash(form.path, old.algorithm, old.digest)
            if old is None or name is None:
                continue
            if old.digest == form.digest:
                return None
            if self._destination.is_there(old.replaced(path=name, remote=None)):
                return Index(suite, index.kind, [old.replaced(path=name, remote=None)])
        return None

    def _by_hash(self, index: Index, paths: Iterable[str]) -> Iterator[Index]:
        """Yield the previous version of an index in all its forms, as far as they exist by hash."""
        above = os.path.join(os.path.dirname(index.path), "by-hash", "")
        release = index.suite.release
        now = {digest.hex() for path in release.files for _, digest in release.digests_of(path)}
        old = [
            path for path in paths if path.startswith(above) and path.rpartition("/")[2] not in now
        ]
        old.sort(key=lambda path: -os.lstat(self._destination.where(path)).st_mtime_ns)
        # There is one directory for each algorithm; that of a flat suite has both packages and sources.
        kinds = len({os.path.dirname(path) for path in old}) or 1
        for path in old[: kinds * (2 * len(HELD) if index.suite.is_flat else len(HELD))]:
            yield Index(index.suite, index.kind, [ArchiveFile(path, None, "sha256", b"")])

    def _named(self, index: Index) -> Iterator[str]:
        path = index.path
        if not os.path.lexists(self._destination.where(path)):
            index.forms[0] = index.forms[0].replaced(path=path + debian_index_update.ENDING)
        count = 0
        skipped: list[BadEntry] = []
        try:
            for each in named_by(
                self._destination, index, lambda why: skipped.__setitem__(slice(1), [why])
            ):
                yield each.path
                count += 1
            if skipped and not count:
                raise skipped[0]
        except (BadEntry, OSError) as error:
            raise _unreadable(path, error) from error

    def _other_suites(self, paths: Sequence[str]) -> Iterator[Suite]:
        """
        Yield the suites that the run has not mirrored, each once; they are found by their release files.
        """
        own = {suite.directory for suite in self._suites}
        for path in paths:
            above, _, name = path.rpartition("/")
            if name not in ("InRelease", "Release") or above in own:
                continue
            is_flat = not path.startswith("dists/")
            data = self._destination.read(path, MAX_RELEASE_BYTES)
            try:
                release = read_release(
                    unsigned_part(data or b""), path, ignore_entry, ignores_dates=True
                )
            except BadEntry as error:
                if os.path.basename(above).startswith(_OF_INDEXES):
                    continue
                if is_flat and not any(
                    names_packages(each) and os.path.dirname(each) == above for each in paths
                ):
                    continue  # not a release file of a suite, but another file with this name
                raise _unreadable(path, error) from error
            own.add(above)
            yield Suite(above, release, {}, None, is_flat)


def _belonging(suite: Suite, paths: Iterable[str]) -> list[str]:
    """
    Return the release files, indexes and other files of another run's suite; not the packages that its
    indexes name.
    """
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
    """Yield the existing forms of a flat suite's index, including those by hash."""
    base = base_of(index.path)
    suite, release = index.suite, index.suite.release
    by_hashes = {
        name
        for inner in release.files
        if _key(suite.place(inner)) == base
        for name in hashed_names(suite, release, suite.place(inner))
    }
    for path in paths:
        if path in by_hashes or (names_packages(path) and base_of(path) == base):
            yield path


def _component_of(path: str) -> str:
    return os.path.dirname(os.path.dirname(path))


def _indexes_of(suite: Suite, paths: Iterable[str]) -> Iterator[Index]:
    """Yield the existing indexes of a suite that the run has not mirrored, each in its best form."""
    best: dict[str, int] = {}
    for path in paths:
        if names_packages(path) and "/by-hash/" not in path:
            base = base_of(path)
            ending = path[len(base) :]
            if ending in READ:
                best[base] = min(best.get(base, len(READ)), READ.index(ending))
    for base, number in best.items():
        yield Index(suite, _kind(base), [ArchiveFile(base + READ[number], None, "sha256", b"")])


def _unreadable(path: str, error: Exception) -> MirrorError:
    return MirrorError(
        f"{path} cannot be read ({error}), so the files that it needs are not known; nothing was removed: "
        "mirror it, or remove it if it is not needed"
    )

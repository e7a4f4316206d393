"""A mirror of a Debian archive; which files of earlier and other runs are kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

from pipegrid.errors import UsageError
from pipegrid.mirror import debian_index_update
from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    check_path,
    holder,
    quoted,
)
from pipegrid.mirror.debian_index_rebuild import (
    prepare,
    read_record,
    rebuilt,
    record_of,
    write_record,
)
from pipegrid.mirror.debian_index_update import Unpacked, by_hash, kept_as, stage_indexes, update
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.index_entries import Entries, named_twice
from pipegrid.mirror.manifest import add_to_manifest, keep_manifest, noting, read_manifest
from pipegrid.mirror.package_filter import (
    ALL,
    FilterRecords,
    Matches,
    PackageFilter,
    others_of,
    read_records,
    write_first,
    write_records,
)
from pipegrid.mirror.signatures import Keys
from pipegrid.mirror.suites import (
    HELD,
    OWN,
    READ,
    Index,
    KeptForm,
    OwnNames,
    Selection,
    Suite,
    Suites,
    base_of,
    below,
    canonical,
    check_selected,
    further_index,
    hashed_names,
    ignore_entry,
    index_of,
    indexes_of,
    named_by,
    names_packages,
    own_files,
    remove_in_order,
    unsigned_part,
)

if TYPE_CHECKING:
    from pipegrid.mirror.debian_index_update import ArchiveMirror
    from pipegrid.mirror.signature_writer import GpgKey


# The files of a Debian archive that are kept although a run does not name them: suites and indexes of other
# runs in the same directory, and what the previous version's indexes name.
#
# A client that has just read the previous release file fetches its indexes by hash, for one more version,
# so the files in these must exist as long. Several runs may share a directory, each with its suites, or
# with components or architectures of one suite: none removes files of another. Only files without an index
# are removed.
#
# Synchronous, for the thread that has the destination.

_OF_INDEXES = ("binary-", "source")
"""
Names of directories whose ``Release`` is not that of a suite, but describes the index in the same
directory.
"""


def kept_apart(
    destination: Destination,
    suites: Iterable[Suite],
    indexes: Sequence[Index],
    deletes: bool = False,
) -> list[Index]:
    """
    Return the indexes of these suites that other runs keep here, as the new release files name them.

    They share the release file, so a run that publishes a new one updates them too: otherwise their readers
    would take them for forged. An index that the last run kept together with all current indexes is not
    another run's, and is not kept. Neither are other files in the directory of a selected index, such as
    translations, if the run removes unwanted files.
    """
    taken = {_key(form.path) for index in indexes for form in index.forms}
    chosen = {path for path in taken if names_packages(path)}
    own = {_component_of(index.path) for index in indexes if index.kind}
    found = []
    last: set[str] | None = None
    for suite in suites:
        for index in _here(destination, suite, taken):
            if last is None:
                last = _kept_by_last_run(destination)
            if not names_packages(index.path):
                if deletes and _is_below(index.path, own):
                    continue
            elif base_of(index.path) in last and chosen <= last:
                continue
            found.append(index)
    return found


def _is_below(path: str, directories: set[str]) -> bool:
    return any(path.startswith(f"{each}/") for each in directories)


def _key(path: str) -> str:
    """Return the part of the path that all forms of one index share."""
    return base_of(path) if names_packages(path) else path


def _kept_by_last_run(destination: Destination) -> set[str]:
    """Return the indexes that the last complete run kept."""
    with suppress(MirrorError, BadEntry):
        return {
            base_of(each.path) for each in read_manifest(destination) if names_packages(each.path)
        }
    return set()


def _here(destination: Destination, suite: Suite, taken: set[str]) -> Iterator[Index]:
    """
    Yield the indexes of a suite that exist, that the previous and the new release file name, and that are
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
        held, endings = _held_here(destination, key, suite.before)
        if held is not None and any(base + ending in named for ending in READ):
            yield index_of(suite, _kind(base), base, held if base in named else "packed", endings)


def _held_here(
    destination: Destination, base: str, before: Release | None
) -> tuple[KeptForm | None, list[str]]:
    """Return in which form an index is kept here, and the endings of its forms; None if it is not."""
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
    destination: Destination, kept: Iterable[str], spared: RetainedFiles, dry_run: bool = False
) -> list[str]:
    """
    Remove all files but these paths and the retained ones; returns the removed paths.

    Args:
        dry_run: only report.

    Raises:
        MirrorError: other files that are needed here cannot be found out; nothing is removed.
    """
    others = list(destination.others(frozenset(kept)))
    if others:  # else the indexes of other runs need not be read
        stays = holder(spared.names(others), destination.folds)
        others = [path for path in others if not stays(path)]
    if not dry_run:
        remove_in_order(destination, others)
    return others


class RetainedFiles:
    """
    Finds the files to keep.

    Args:
        suites, indexes: what the run has mirrored.
        apart: as returned by ``kept_apart``.
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
        Yield those of some files that are kept; also other paths.

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
            # Keep all files of another run's component; of a shared one, those in the index's directory.
            component = _component_of(index.path)
            above = os.path.dirname(index.path) if component in own else component
            if index.suite.is_flat:
                yield from _forms_of(index, paths)
            else:
                # The run itself keeps the last versions of names by hash.
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
        Return the suite that a link in the same directory leads to, such as ``stable``; debmirror makes
        such links.
        """
        where = self._destination.where(path)
        if os.path.dirname(path) != "dists" or not os.path.islink(where):
            return None
        return f"dists/{os.path.normpath(os.readlink(where))}"

    def _before(self, index: Index) -> Index | None:
        """Return the previous version of an index, if it is kept by hash and differs."""
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
        """Yield the previous indexes that exist by hash: one version in all its forms."""
        above = os.path.join(os.path.dirname(index.path), "by-hash", "")
        release = index.suite.release
        now = {digest.hex() for path in release.files for _, digest in release.digests_of(path)}
        old = [
            path for path in paths if path.startswith(above) and path.rpartition("/")[2] not in now
        ]
        old.sort(key=lambda path: -os.lstat(self._destination.where(path)).st_mtime_ns)
        # One directory for each algorithm, in which a flat suite has both packages and sources.
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
        """Yield the suites that are not of this run, each once, by their release files."""
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
                    continue  # not a suite, but a file of that name
                raise _unreadable(path, error) from error
            own.add(above)
            yield Suite(above, release, {}, None, is_flat)


def _belonging(suite: Suite, paths: Iterable[str]) -> list[str]:
    """Return the files of another run's suite, except those that its indexes name."""
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
    """Yield the existing forms of a flat suite's index, also by hash."""
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
    """Yield the existing indexes of a suite that is not this run's."""
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


# A mirror of a Debian archive: release files, indexes, packages. A client that reads it meanwhile never
# finds a name without its file.
#
# 1. The release files are fetched from the first mirror with signed ones, which decides the version. 2. The
# indexes in them are staged, where no client sees them (``indexes``), and verified by hash. 3. The files in
# these are fetched while the indexes are being read, and published. 4. When all files exist the indexes are
# published, the release files last; then files that are not named any more may be removed.
#
# If a file is missing after step 3 the previous indexes stay, since all their files exist; unless the
# caller wants to keep going. Unusable entries of an index are skipped and counted. Indexes of the same
# suites that other runs keep here are updated as well, since the release file is the same. During step 4
# the previous release file exists together with new indexes; in an archive with indexes by hash, clients
# still find the previous ones, as long as nothing is deleted.

T = TypeVar("T")

__all__ = ["DebianArchive", "DebianOutcome", "Selection", "names_by_hash"]

MAX_NAMED = 5_000_000
"""The largest archive names 1.4 million files."""


class DebianOutcome:
    """
    The outcome of a run.

    Attributes:
        report: of the packages.
        removed: paths that were deleted, or would be.
        index_bytes: fetched for indexes and their patches.
        patched: indexes that patches brought up to date.
        lacking: files of ``also``, or further forms of indexes, that no mirror has.
        absent: a sentence for each wanted item that the release files do not name.
        entries: of the indexes, with the unusable ones.
        is_published: whether the new indexes were published.
        is_new: whether the release files differ from the previous ones.
        unmatched: options and patterns of filters that match nothing.
        spares_others: whether files are kept that filters of earlier runs select.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.entries = Entries()
        self.absent: list[str] = []
        self.is_published = self.is_new = False
        self.removed: list[str] = []
        self.index_bytes = self.patched = 0
        self.unmatched: list[tuple[str, str]] = []
        self.spares_others = False
        self.lacking: list[str] = []


class DebianArchive:
    """
    A mirror of some suites of an archive.

    Args:
        mirror: the mirrors and the destination.
        now: for the dates of release files.
        ignores_dates: accept a suite that has expired, or is from the future; but not one older than the
            existing one.
        signing: signs rebuilt indexes of the fetched files, which are published instead of the archive's;
            see ``index_writer``. None: the archive's are published.

    Raises:
        UsageError: the name of a suite, component or architecture is invalid; or all suites are flat, but
            there are components; or rebuilt indexes are wanted in another form than packed.
    """

    def __init__(
        self,
        mirror: ArchiveMirror,
        selection: Selection,
        keys: Keys,
        now: datetime | None = None,
        ignores_dates: bool = False,
        signing: GpgKey | None = None,
    ) -> None:
        if signing is not None and (selection.with_patches or selection.indexes != "packed"):
            raise UsageError(
                "rebuilt indexes are packed and have no patches; leave out --diffs and --indexes"
            )
        if not selection.suites:
            raise UsageError("give a suite, such as sid")
        names = [_checked_name(name, canonical) for name in selection.suites]
        for name in (*selection.components, *selection.architectures):
            _checked_name(name, check_path)
        if selection.components and all(name.endswith("/") for name in names):
            raise UsageError(
                f"the suite {names[0]} is flat, as all that end in a slash, and has no components; give none"
            )
        self._mirror = mirror
        self._destination = mirror.destination
        self._selection = selection
        self._signing = signing
        self._suites = Suites(mirror, keys, now, ignores_dates)
        self._names = list(dict.fromkeys(names))

    async def sync(
        self,
        delete: bool = False,
        dry_run: bool = False,
        keep_going: bool = False,
        delete_excluded: bool = False,
    ) -> DebianOutcome:
        """
        Bring the mirror up to date. Call it once.

        Args:
            delete: remove files that are not named any more, if nothing failed or was skipped.
            dry_run: fetch only indexes, publish nothing; the same as for ``mirror``.
            keep_going: publish the indexes even if mirrors lack an index, or files in it.
            delete_excluded: with ``delete``, also remove files that only filters of earlier runs select.

        Raises:
            MirrorError: no mirror has a trusted release file, an index could not be fetched, the release
                files name nothing of the selection, or the filters select no package.
            BadEntry: an index cannot be read.
        """
        outcome = DebianOutcome()
        entries = outcome.entries
        suites = [await self._suites.find(name, entries.skip) for name in self._names]
        check_selected(suites, self._selection)
        indexes = [
            each for suite in suites for each in indexes_of(suite, self._selection, outcome.absent)
        ]
        apart = await self._mirror.run(kept_apart, self._destination, suites, indexes, delete)
        if self._signing is not None:
            apart = await self._mirror.run(prepare, self._destination, indexes, apart)
        gone = await self._stage([*indexes, *apart], outcome, keep_going)
        indexes = [each for each in indexes if each not in gone]
        apart = [each for each in apart if each not in gone]
        everything = [*indexes, *apart]
        records = await self._mirror.run(self._set_filters, indexes, apart, delete_excluded)
        matches = Matches(self._selection.filter)
        further = list(_further(indexes, _all_own(suites)))
        contents = entries.once(self._contents(indexes, entries.skip, matches))
        if not dry_run:
            contents = noting(self._destination, contents, () if self._signing else further)
        also = entries.once(self._contents(apart, entries.skip))
        report = outcome.report = await self._mirror.sync(chain(contents, also))
        outcome.unmatched = matches.unmatched()
        matches.check()
        if not dry_run and not (report.failed_files and report.is_stopped):
            await entries.settle(self._mirror, report)
        if report.failed_files and (not keep_going or report.is_stopped):
            return outcome
        if dry_run:
            outcome.is_new = await self._mirror.run(self._would_be_new, suites)
        else:
            await self._mirror.run(write_first, self._destination, records)
            suites = await self._show(suites, everything, outcome)
            further = list(_further(indexes, _all_own(suites)))
            await self._mirror.run(write_records, self._destination, records)
        if delete and not (report.failed_files or entries.skipped_files or outcome.unmatched):
            await self._delete(suites, indexes, apart, further, outcome, dry_run)
        return outcome

    async def _show(
        self, suites: list[Suite], indexes: Sequence[Index], outcome: DebianOutcome
    ) -> list[Suite]:
        """Rebuild indexes if that is wanted, and publish them; returns the suites as published."""
        record = record_of(suites)
        if self._signing is not None:
            suites = await self._mirror.run(
                rebuilt, self._destination, suites, indexes, self._signing
            )
            further = _further(indexes, _all_own(suites))
            await self._mirror.run(add_to_manifest, self._destination, further)
        own = _all_own(suites)
        outcome.is_new = not await self._mirror.run(self._destination.holds, own)
        await self._mirror.run(self._publish, suites, indexes, own, outcome.entries)
        await self._mirror.run(keep_manifest, self._destination, outcome.entries.replaced)
        if self._signing is not None:
            await self._mirror.run(write_record, self._destination, record)
        outcome.is_published = True
        return suites

    def _would_be_new(self, suites: Sequence[Suite]) -> bool:
        """
        Return whether the release files differ from the existing ones, or from those that the rebuilt ones
        were made of. In the thread.
        """
        if self._signing is None:
            return not self._destination.holds(_all_own(suites))
        return not record_of(suites).items() <= read_record(self._destination).items()

    async def _delete(
        self,
        suites: Sequence[Suite],
        indexes: Sequence[Index],
        apart: Sequence[Index],
        further: Sequence[ArchiveFile],
        outcome: DebianOutcome,
        dry_run: bool,
    ) -> None:
        outcome.spares_others = any(each.stays != each.filters for each in indexes)
        everything = [*indexes, *apart]
        spared = RetainedFiles(self._destination, suites, everything, apart)
        kept = chain(self._contents(everything, stays=True), _further(apart, {}), further)
        paths = chain((each.path for each in kept), _names_by_hash(suites, everything))
        outcome.removed = await self._mirror.run(
            remove_others, self._destination, paths, spared, dry_run
        )

    # Indexes.

    async def _stage(
        self, indexes: Sequence[Index], outcome: DebianOutcome, keep_going: bool
    ) -> list[Index]:
        """Stage indexes, where no client sees them; returns those that could not be fetched."""
        made = [i for i in indexes if i.held != "packed" and i.kind in ("packages", "sources")]
        if made:
            wants = [await self._mirror.run(self._unpacked, index) for index in made]
            done = await update(self._mirror, wants, patches_are_kept=self._selection.with_patches)
            outcome.index_bytes += done.fetched_bytes
            outcome.patched += done.patched
            await self._mirror.run(self._note_forms, made, wants)
        plain = [index for index in indexes if index not in made]
        fetched = await stage_indexes(
            self._mirror, [form for index in plain for form in index.forms]
        )
        outcome.index_bytes += fetched.size_bytes
        gone = []
        for index in plain:
            await self._settle_forms(index, fetched.lacking, outcome)
            if index.forms:
                continue
            gone.append(index)
            if index.kind in ("packages", "sources"):
                path = index.wanted_path
                reason = f"the index {path} could not be fetched ({fetched.lacking[path]})"
                if not keep_going:
                    raise MirrorError(f"{reason}; the old one stays (--keep-going leaves it out)")
                outcome.entries.skip(BadEntry(reason))
        gone += await self._mirror.run(self._unreadable_patches, plain, outcome.entries.skip)
        return gone

    async def _settle_forms(
        self, index: Index, lacking: dict[str, str], outcome: DebianOutcome
    ) -> None:
        """Keep those forms of an index that mirrors have; if they have none, one of the others."""
        inner = index.suite.within
        others = index.suite.release.others
        for place, form in enumerate(list(index.forms)):
            again = [below(index.suite, each) for each in others.get(inner(form.path), ())]
            if again:
                outcome.entries.skip(named_twice(form.path))
            if form.path not in lacking:
                continue
            found = await self._first_of(again, outcome)
            if found is not None:
                index.forms[place] = found
                continue
            outcome.lacking.append(form.path)
            index.forms.remove(form)
        if not index.forms:
            found = await self._first_of(index.spare, outcome)
            if found is not None:
                index.forms = [found]

    async def _first_of(
        self, forms: Iterable[ArchiveFile], outcome: DebianOutcome
    ) -> ArchiveFile | None:
        """Fetch the first of these that mirrors have."""
        for form in forms:
            fetched = await stage_indexes(self._mirror, [form])
            outcome.index_bytes += fetched.size_bytes
            if not fetched.lacking:
                return form
        return None

    def _unreadable_patches(self, indexes: Sequence[Index], skip: Skip) -> list[Index]:
        """
        Return the lists of patches that cannot be verified, for example because of weak hashes. In the
        thread.
        """
        found = []
        for index in indexes:
            if index.kind == "patches" and index.forms:
                why = _why_unreadable(self._destination, index)
                if why is not None:
                    skip(why)
                    found.append(index)
        return found

    def _note_forms(self, made: Sequence[Index], wants: Sequence[Unpacked]) -> None:
        """Record indexes by their files. In the thread."""
        for index, want in zip(made, wants, strict=True):
            kept = kept_as(self._mirror, want)
            assert kept is not None
            index.forms = [kept]

    def _unpacked(self, index: Index) -> Unpacked:
        """Find what an index can be made of. In the thread."""
        suite, target = index.suite, index.forms[0]
        base = suite.within(target.path)
        named = suite.release.files
        patches = named.get(f"{base}.diff/Index")
        have = None
        known = suite.before.files if suite.before is not None else {}
        if base in known:
            # The existing release file describes the existing index, in whatever form.
            for ending in ("", *HELD):
                form = known.get(base + ending)
                if form is not None and self._destination.is_there(below(suite, form)):
                    have = (f"{target.path}{ending}", known[base])
                    break
            kept = debian_index_update.find(
                self._destination, below(suite, known[base]), staged=False
            )
            if have is None and kept is not None:
                have = (kept.path, known[base])
        return Unpacked(
            target,
            tuple(below(suite, named[base + ending]) for ending in READ if base + ending in named),
            None if patches is None else below(suite, patches),
            have,
            index.held == "zstd",
        )

    # The files in the indexes.

    def _set_filters(
        self, indexes: Sequence[Index], apart: Sequence[Index], delete_excluded: bool
    ) -> FilterRecords:
        """
        Filter indexes by the filters of this run and of earlier ones; return the records. In the thread.
        """
        own = self._selection.filter
        known = read_records(self._destination)
        suites = {index.suite.directory for index in (*indexes, *apart)}
        records = {
            path: filters
            for path, filters in known.items()
            if not any(path.startswith(f"{each}/") for each in suites)
        }
        for index in (*indexes, *apart):
            if index.kind not in ("packages", "sources"):
                continue
            key = base_of(index.path)
            is_here = _held_here(self._destination, key, index.suite.before)[0] is not None
            wanted = known.get(key, [ALL] if is_here else [])
            if index in apart:
                index.filters = index.stays = _unless_all(wanted)
            else:
                wanted = [own, *([] if delete_excluded else others_of(wanted, own))]
                index.filters, index.stays = _unless_all([own]), _unless_all(wanted)
            if wanted != [ALL]:
                records[key] = wanted
            if index.kind == "sources":
                index.beside = [
                    each
                    for each in (*indexes, *apart)
                    if each.kind == "packages" and each.suite is index.suite
                ]
        return records

    def _contents(
        self,
        indexes: Sequence[Index],
        skip: Skip | None = None,
        matches: Matches | None = None,
        stays: bool = False,
    ) -> Iterator[ArchiveFile]:
        """Yield the files that the indexes name and filters select; a file may be named several times."""
        count = 0
        own = OwnNames(
            {each.suite.directory: each.suite for each in indexes}.values(),
            (form for index in indexes for form in index.forms),
        )
        for index in indexes:
            for each in named_by(self._destination, index, skip, matches, stays):
                why = own.refusal(each, index.path) if index.kind != "patches" else None
                if why is not None:
                    if skip is not None:
                        skip(why)
                    continue
                count += 1
                if count > MAX_NAMED:
                    raise BadEntry(f"the indexes name more than {MAX_NAMED} files; no archive does")
                yield each

    # Publication.

    def _publish(
        self,
        suites: Sequence[Suite],
        indexes: Sequence[Index],
        own: dict[str, bytes],
        entries: Entries,
    ) -> None:
        """
        Publish names by hash, indexes, release files; no previous file stays under those names. In the
        thread.
        """
        destination = self._destination
        # An unchanged file keeps its time: clients ask whether it has changed since.
        destination.stage(
            {path: d for path, d in own.items() if destination.read(path, len(d)) != d}
        )
        forms = [form for index in indexes for form in index.forms]
        for index in indexes:
            self._link_by_hash(index, entries)
        # A form that is not kept any more would not match the new release file, and one that was not kept
        # would not match the previous one. If clients use names by hash, those suffice.
        late = {
            form.path for form in forms if form.remote is not None and self._is_new(form, suites)
        }
        early = [form.path for form in forms if form.path not in late]
        kept = {form.path for form in forms} | own.keys()

        def delete(paths: Iterable[str]) -> None:
            for path in paths:
                if path not in kept:
                    destination.delete(path)

        delete(chain.from_iterable(_before(suite) for suite in suites if _has_hashes(suite)))
        destination.release([*early, *own, *sorted(late)])
        delete(chain.from_iterable((*_before(suite), *map(suite.place, OWN)) for suite in suites))
        destination.clear_staged()

    def _link_by_hash(self, index: Index, entries: Entries) -> None:
        """Add the names by hash of an index: one for each hash in the release file, after checking it."""
        destination = self._destination
        for form in index.forms:
            if form.remote is None:
                continue
            inner = index.suite.within(form.path)
            for algorithm, digest in index.suite.release.digests_of(inner):
                name = by_hash(form.path, algorithm, digest)
                if name is None or destination.is_linked(form.path, name):
                    continue
                if algorithm != form.algorithm and not destination.has_hash(
                    form.path, algorithm, digest
                ):
                    entries.skip(
                        BadEntry(
                            f"the {algorithm} of {quoted(form.path)} does not match the release file"
                        )
                    )
                    continue
                destination.link(form.path, name)

    def _is_new(self, form: ArchiveFile, suites: Sequence[Suite]) -> bool:
        """Return whether a form of an index is new, in a suite that had a release file."""
        is_there = os.path.lexists(self._destination.where(form.path))
        return not is_there and any(map(_has_hashes, suites))


def _unless_all(filters: Sequence[PackageFilter]) -> tuple[PackageFilter, ...] | None:
    """Return filters; None if one of them selects all."""
    return None if ALL in filters else tuple(filters)


def _further(indexes: Sequence[Index], own: dict[str, bytes]) -> Iterator[ArchiveFile]:
    """Yield the kept files that the indexes do not name."""
    for index in indexes:
        yield from index.forms
    for path, data in own.items():
        yield ArchiveFile(path, len(data), "sha256", sha256(data).digest())


def _all_own(suites: Iterable[Suite]) -> dict[str, bytes]:
    """Return the release files of suites, by path."""
    return {path: data for suite in suites for path, data in own_files(suite).items()}


def _why_unreadable(destination: Destination, index: Index) -> BadEntry | None:
    try:
        for _ in named_by(destination, index):
            pass
    except BadEntry as error:
        return error
    return None


def _checked_name(name: str, check: Callable[[str], T]) -> T:
    try:
        return check(name)
    except BadEntry:
        raise UsageError(
            f"{quoted(name)} is not a suite, component or architecture that can be mirrored; the suite of a "
            "flat"
            " archive ends in a slash, such as ./"
        ) from None


def _before(suite: Suite) -> list[str]:
    """Return the paths of forms of packages and sources by the previous release file."""
    paths = [below(suite, form).path for form in _main_forms(suite.before)]
    return [*paths, *(path + debian_index_update.ENDING for path in paths)]


def _has_hashes(suite: Suite) -> bool:
    """Return whether clients of both the previous and the new release file fetch by hash first."""
    return suite.before is not None and suite.before.by_hash and suite.release.by_hash


def _main_forms(release: Release | None) -> Iterator[ArchiveFile]:
    """Yield the packed and unpacked forms of the indexes of packages and sources."""
    for path, form in release.files.items() if release is not None else ():
        if names_packages(path):
            yield form


def _names_by_hash(suites: Sequence[Suite], indexes: Sequence[Index]) -> Iterator[str]:
    """Yield the current and previous names by hash: a client with the previous release file uses those."""
    kept = {form.path for index in indexes for form in index.forms}
    for index in indexes:
        for form in index.forms:
            if form.remote is not None:
                yield from hashed_names(index.suite, index.suite.release, form.path)
    for suite in suites:
        for path in suite.before.files if suite.before is not None else ():
            place = suite.place(path)
            if place in kept:
                yield from hashed_names(suite, suite.before, place)


def names_by_hash(
    destination: Destination, entries: Iterable[ArchiveFile]
) -> Iterator[tuple[str, str]]:
    """
    Yield each index's path, and its name by hash, of suites that have such names; see ``Destination.link``.

    Args:
        entries: the files of an archive, all present or staged.
    """
    for own in entries:
        directory, _, name = own.path.rpartition("/")
        if name not in ("InRelease", "Release"):
            continue
        data = destination.read(f"{STAGED}/{own.path}", MAX_RELEASE_BYTES)
        if data is None:
            data = destination.read(own.path, MAX_RELEASE_BYTES)
        try:
            release = read_release(
                unsigned_part(data or b""), own.path, ignore_entry, ignores_dates=True
            )
        except BadEntry:  # next to an index there may be a ``Release`` that describes it
            continue
        suite = Suite(directory, release, {}, None)
        for each in entries if release.by_hash else ():
            inner = suite.within(each.path)
            named = release.files.get(inner)
            if named is None or (named.algorithm, named.digest) != (each.algorithm, each.digest):
                continue
            for algorithm, digest in release.digests_of(inner):
                other = by_hash(each.path, algorithm, digest)
                is_right = algorithm == each.algorithm or destination.has_hash(
                    each.path, algorithm, digest
                )
                if other is not None and is_right:
                    yield each.path, other

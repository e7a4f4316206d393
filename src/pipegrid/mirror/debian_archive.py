"""A mirror of a Debian archive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import TypeVar

from pipegrid.errors import UsageError
from pipegrid.mirror import debian_index_update
from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    check_path,
    quoted,
)
from pipegrid.mirror.debian_filtered_indexes import (
    prepare,
    read_record,
    rebuilt,
    record_of,
    write_record,
)
from pipegrid.mirror.debian_index_selection import (
    HELD,
    READ,
    Index,
    Selection,
    base_of,
    below,
    check_selected,
    hashed_names,
    ignore_entry,
    indexes_of,
    named_by,
    names_packages,
)
from pipegrid.mirror.debian_index_update import (
    ArchiveMirror,
    Unpacked,
    by_hash,
    kept_as,
    stage_indexes,
    update,
)
from pipegrid.mirror.debian_metadata import MAX_RELEASE_BYTES, read_release
from pipegrid.mirror.debian_release_files import (
    OWN,
    OwnNames,
    Suite,
    Suites,
    canonical,
    own_files,
    unsigned_part,
)
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.manifest import add_to_manifest, keep_manifest, noting
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
from pipegrid.mirror.retained_files import RetainedFiles, held_here, kept_apart, remove_others
from pipegrid.mirror.signatures import GpgKey, Keys
from pipegrid.mirror.unique_entries import ArchiveOutcome, Entries, named_twice

# A mirror of a Debian archive: release files, indexes, packages. A client that reads the mirror during a run
# never finds a name in an index whose file is missing.
#
# 1. The release files are fetched from the first mirror with validly signed ones, which decides the version.
# 2. The indexes that they name are staged, where no client sees them, and verified by hash.
# 3. The files that the indexes name are fetched while the indexes are being read, and published.
# 4. When all files exist the indexes are published, the release files last. After that, if the caller wants
#    it, files that no index names any more are removed.
#
# If a file is missing after step 3 the previous indexes stay, since all their files exist; unless the caller
# wants to keep going. Unusable entries of an index are skipped and counted. Indexes of the same suites that
# other runs keep in this destination are updated as well, since the release file is the same. During step 4
# the previous release file exists together with new indexes; in an archive with indexes by hash, clients
# still find the previous indexes, as long as nothing is deleted.

T = TypeVar("T")

__all__ = ["DebianArchive", "DebianOutcome", "Selection", "names_by_hash"]

MAX_NAMED = 5_000_000
"""The maximum number of files that all indexes together may name; the largest archive names 1.4 million."""


class DebianOutcome(ArchiveOutcome):
    """
    The outcome of a run.

    Attributes:
        patched: how many indexes patches brought up to date.
        absent: a sentence for each wanted item that the release files do not name.
    """

    patched = 0

    def __init__(self) -> None:
        super().__init__()
        self.absent: list[str] = []


class DebianArchive:
    """
    A mirror of some suites of an archive.

    Args:
        mirror: the mirrors and the destination.
        now: the time with which dates of release files are compared; None: the current time.
        ignores_dates: accept a suite that has expired or is from the future, but none that is older than the
            existing one.
        signing: the key that signs rebuilt indexes, which name only the fetched files and replace the
            archive's; see ``debian_filtered_indexes``. None: the archive's indexes are published.

    Raises:
        UsageError: there is no suite; the name of a suite, component or architecture is invalid; all suites
            are flat, but components are given; or rebuilt indexes are wanted with patches or not packed.
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
        Bring the mirror up to date. Call this once.

        Args:
            delete: remove files that are not named any more, if nothing failed or was skipped, and every
                pattern of the filter matched.
            dry_run: fetch only indexes, publish nothing; ``mirror`` must be made for a dry run, too.
            keep_going: publish the indexes even if mirrors lack an index, or files that an index names.
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
        """
        Rebuild indexes if that is wanted, and publish the indexes; return the suites as they were published.
        """
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
        Return whether the release files differ from the existing ones; if indexes are rebuilt, from those
        that the existing indexes were rebuilt from. Runs in the destination's thread.
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
        retained = RetainedFiles(self._destination, suites, everything, apart)
        kept = chain(self._contents(everything, stays=True), _further(apart, {}), further)
        paths = chain((each.path for each in kept), _names_by_hash(suites, everything))
        outcome.removed = await self._mirror.run(
            remove_others, self._destination, paths, retained, dry_run
        )

    # Indexes.

    async def _stage(
        self, indexes: Sequence[Index], outcome: DebianOutcome, keep_going: bool
    ) -> list[Index]:
        """
        Stage indexes, where no client sees them; return those that could not be fetched, and lists of patches
        that could not be read.
        """
        made = [i for i in indexes if i.held != "packed" and i.kind in ("packages", "sources")]
        if made:
            wants = [await self._mirror.run(self._unpacked, index) for index in made]
            fetched_bytes, patched = await update(
                self._mirror, wants, patches_are_kept=self._selection.with_patches
            )
            outcome.index_bytes += fetched_bytes
            outcome.patched += patched
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
        """
        Keep only the forms of an index that mirrors have, if necessary with an alternative hash; if mirrors
        have no form, fetch a fallback.
        """
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
            found = await self._first_of(index.fallbacks, outcome)
            if found is not None:
                index.forms = [found]

    async def _first_of(
        self, forms: Iterable[ArchiveFile], outcome: DebianOutcome
    ) -> ArchiveFile | None:
        """Fetch and return the first of these forms that mirrors have; None if they have none."""
        for form in forms:
            fetched = await stage_indexes(self._mirror, [form])
            outcome.index_bytes += fetched.size_bytes
            if not fetched.lacking:
                return form
        return None

    def _unreadable_patches(self, indexes: Sequence[Index], skip: Skip) -> list[Index]:
        """
        Return the lists of patches that cannot be read, for example because of weak hashes. Runs in the
        destination's thread.
        """
        found = []
        for index in indexes:
            if index.kind == "patches" and index.forms:
                try:
                    for _ in named_by(self._destination, index):
                        pass
                except BadEntry as error:
                    skip(error)
                    found.append(index)
        return found

    def _note_forms(self, made: Sequence[Index], wants: Sequence[Unpacked]) -> None:
        """
        Set the forms of the unpacked indexes to the files that are kept. Runs in the destination's thread.
        """
        for index, want in zip(made, wants, strict=True):
            kept = kept_as(self._mirror, want)
            assert kept is not None
            index.forms = [kept]

    def _unpacked(self, index: Index) -> Unpacked:
        """
        Find the existing index, the patches and the packed forms that an unpacked index can be made from.
        Runs in the destination's thread.
        """
        suite, target = index.suite, index.forms[0]
        base = suite.within(target.path)
        named = suite.release.files
        patches = named.get(f"{base}.diff/Index")
        have = None
        known = suite.before.files if suite.before is not None else {}
        if base in known:
            # The existing release file describes the existing index, in whatever form that is kept.
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

    # The files that the indexes name.

    def _set_filters(
        self, indexes: Sequence[Index], apart: Sequence[Index], delete_excluded: bool
    ) -> FilterRecords:
        """
        Set ``filters`` of indexes to those of this run, and ``stays`` also to those of earlier runs; return
        the records to write. Runs in the destination's thread.
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
            is_here = held_here(self._destination, key, index.suite.before)[0] is not None
            wanted = known.get(key, [ALL] if is_here else [])
            if index in apart:
                index.filters = index.stays = _unless_all(wanted)
            else:
                wanted = [own, *([] if delete_excluded else others_of(wanted, own))]
                index.filters, index.stays = _unless_all([own]), _unless_all(wanted)
            if wanted != [ALL]:
                records[key] = wanted
            if index.kind == "sources":
                index.package_indexes = [
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
        """
        Yield the files that the indexes name and filters select; a file that is named several times is
        yielded several times.
        """
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
        Publish the names by hash, the indexes, and the release files. Previous indexes and release files that
        are not replaced are removed. Runs in the destination's thread.
        """
        destination = self._destination
        destination.stage(own)
        forms = [form for index in indexes for form in index.forms]
        for index in indexes:
            self._link_by_hash(index, entries)
        # A form of an index that is no longer kept would not match the new release file, so it is removed; a
        # newly kept form would not match the previous release file, so it is published late. Clients that
        # fetch by hash do not need these names.
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
        """Add an index's names by hash: one for each hash in the release file that the index really has."""
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
        """
        Return whether a form of an index does not exist yet, while clients of some suite fetch indexes by
        hash.
        """
        is_there = os.path.lexists(self._destination.where(form.path))
        return not is_there and any(map(_has_hashes, suites))


def _unless_all(filters: Sequence[PackageFilter]) -> tuple[PackageFilter, ...] | None:
    """Return the filters; None if one of them selects everything."""
    return None if ALL in filters else tuple(filters)


def _further(indexes: Sequence[Index], own: dict[str, bytes]) -> Iterator[ArchiveFile]:
    """Yield the kept files that no index names: the indexes themselves and the release files."""
    for index in indexes:
        yield from index.forms
    for path, data in own.items():
        yield ArchiveFile(path, len(data), "sha256", sha256(data).digest())


def _all_own(suites: Iterable[Suite]) -> dict[str, bytes]:
    """Return the contents of all suites' release files by path."""
    return {path: data for suite in suites for path, data in own_files(suite).items()}


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
    """Return the paths of all forms of package and source indexes that the previous release file names."""
    before = suite.before.files if suite.before is not None else ()
    paths = [suite.place(path) for path in before if names_packages(path)]
    return [*paths, *(path + debian_index_update.ENDING for path in paths)]


def _has_hashes(suite: Suite) -> bool:
    """Return whether both the previous and the new release file let clients fetch indexes by hash."""
    return suite.before is not None and suite.before.by_hash and suite.release.by_hash


def _names_by_hash(suites: Sequence[Suite], indexes: Sequence[Index]) -> Iterator[str]:
    """
    Yield the names by hash of the current and of the previous indexes, which clients with the previous
    release file still use.
    """
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
    Yield pairs of an index's path and its name by hash, for suites with such names; see ``Destination.link``.

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
        except BadEntry:  # another kind of ``Release``, which describes the index next to it
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

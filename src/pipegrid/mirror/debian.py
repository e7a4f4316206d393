"""
A Debian archive: release file, indexes, packages; so that whoever reads it meanwhile never finds a name
without its file.

1. Release files are fetched from the first mirror that has one that is signed; that mirror has said what
is to be had. 2. Indexes that it names are brought to where nobody sees them (``indexes``), each proven by
its hash. 3. What they name is fetched, while they are still being read, and gets its names. 4. When all is
there the indexes get theirs, the release files last; then what is not named any more may go.

If anything is missing at the end of 3 the old indexes stay: they name what is there. Between the first
name and the last of 4 the old release file stands beside new indexes; where the archive has indexes by
hash, readers find the old ones so, as long as nothing is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from pipegrid.errors import UsageError
from pipegrid.mirror import compressed
from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, Release, read_release
from pipegrid.mirror.destination import STAGED, Destination
from pipegrid.mirror.indexes import Unpacked, by_hash, kept_as, update
from pipegrid.mirror.manifest import keep_manifest, noting
from pipegrid.mirror.obtain import obtain
from pipegrid.mirror.present import checked
from pipegrid.mirror.report import Report
from pipegrid.mirror.selecting import (
    HELD,
    READ,
    Index,
    Selection,
    base_of,
    below,
    indexes_of,
    named_by,
    names_packages,
)
from pipegrid.mirror.spared import Spared, kept_apart, remove_others
from pipegrid.mirror.suites import (
    OWN,
    OwnNames,
    Suite,
    Suites,
    canonical,
    own_files,
    unsigned_part,
)
from pipegrid.mirror.trust import Keys
from pipegrid.mirror.wanted import BadEntry, MirrorError, Wanted, check_path, quoted

if TYPE_CHECKING:
    from pipegrid.mirror.early import AnyMirror

T = TypeVar("T")

__all__ = ["DebianArchive", "DebianOutcome", "Selection", "names_by_hash"]

MAX_NAMED = 5_000_000
"""Files; the largest archive names 1.4 million."""


class DebianOutcome:
    """
    What has become of a run.

    Attributes:
        report: of the packages.
        removed: paths that were deleted, or would be.
        index_bytes: fetched for indexes and their patches.
        patched: indexes that patches brought up to date.
        lacking: files of ``also``, or further forms of indexes, that no mirror has.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.removed: list[str] = []
        self.index_bytes = self.patched = 0
        self.lacking: list[str] = []


class DebianArchive:
    """
    Args:
        mirror: where it is fetched from and kept.
        now: for the dates of release files.
        ignores_dates: believe a suite that has expired, or is of the future; none older than what is here.

    Raises:
        UsageError: a suite, component or architecture cannot be one, or all suites are flat, and have no
            components.
    """

    def __init__(
        self,
        mirror: AnyMirror,
        selection: Selection,
        keys: Keys,
        now: datetime | None = None,
        ignores_dates: bool = False,
    ) -> None:
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
        self._suites = Suites(mirror, keys, now, ignores_dates)
        self._names = list(dict.fromkeys(names))

    async def sync(self, delete: bool = False, dry_run: bool = False) -> DebianOutcome:
        """
        Bring it up to date. To be called once.

        Args:
            delete: remove what is not named any more, if nothing failed.
            dry_run: fetch indexes only, publish nothing; as the mirror was told.

        Raises:
            MirrorError: no mirror has a release file that can be believed, or an index could not be had.
            BadEntry: an index names what may not be.
            UsageError: what another run keeps here of a suite would not fit its release file any more.
        """
        suites = [await self._suites.find(name) for name in self._names]
        indexes = [each for suite in suites for each in indexes_of(suite, self._selection)]
        apart = await self._mirror.run(kept_apart, self._destination, suites, indexes)
        outcome = DebianOutcome()
        await self._stage(indexes, outcome)
        own = {path: data for suite in suites for path, data in own_files(suite).items()}
        further = list(_further(indexes, own))
        contents = self._contents(indexes)
        if not dry_run:
            contents = noting(self._destination, checked(contents), further)
        report = outcome.report = await self._mirror.sync(contents)
        if report.failed_files:
            return outcome
        if not dry_run:
            await self._mirror.run(self._publish, suites, indexes, apart, own)
            await self._mirror.run(keep_manifest, self._destination)
        if delete:
            spared = Spared(self._destination, suites, indexes, apart)
            kept = chain(self._named(indexes, further), _names_by_hash(suites, indexes))
            outcome.removed = await self._mirror.run(
                remove_others, self._destination, kept, spared, dry_run
            )
        return outcome

    # Indexes.

    async def _stage(self, indexes: Sequence[Index], outcome: DebianOutcome) -> None:
        """Bring indexes to where they can be read, and nobody sees them."""
        ours = self._selection.indexes != "packed"
        made = [i for i in indexes if ours and i.kind in ("packages", "sources")]
        if made:
            wants = [await self._mirror.run(self._unpacked, index) for index in made]
            done = await update(self._mirror, wants, patches_are_kept=self._selection.with_patches)
            outcome.index_bytes += done.fetched_bytes
            outcome.patched += done.patched
            await self._mirror.run(self._note_forms, made, wants)
        plain = [index for index in indexes if index not in made]
        fetched = await obtain(self._mirror, [form for index in plain for form in index.forms])
        outcome.index_bytes += fetched.size_bytes
        for index in plain:
            for form in list(index.forms):
                why = fetched.lacking.get(form.path)
                if why is None:
                    continue
                if form is index.forms[0] and index.kind:
                    raise MirrorError(
                        f"the index {form.path} could not be fetched ({why}); the old one stays"
                    )
                outcome.lacking.append(form.path)
                index.forms.remove(form)

    def _note_forms(self, made: Sequence[Index], wants: Sequence[Unpacked]) -> None:
        """In the thread: keep them as the files that they are."""
        for index, want in zip(made, wants, strict=True):
            kept = kept_as(self._mirror, want)
            assert kept is not None
            index.forms = [kept]

    def _unpacked(self, index: Index) -> Unpacked:
        """In the thread: look what there is to make an index of."""
        suite, target = index.suite, index.forms[0]
        base = suite.within(target.path)
        named = suite.release.files
        patches = named.get(f"{base}.diff/Index")
        have = None
        known = suite.before.files if suite.before is not None else {}
        if base in known:
            # The release file that is here says what is in the index that is here, however that is packed.
            for ending in ("", *HELD):
                form = known.get(base + ending)
                if form is not None and self._destination.is_there(below(suite, form)):
                    have = (f"{target.path}{ending}", known[base])
                    break
            kept = compressed.find(self._destination, below(suite, known[base]), staged=False)
            if have is None and kept is not None:
                have = (kept.path, known[base])
        return Unpacked(
            target,
            tuple(below(suite, named[base + ending]) for ending in READ if base + ending in named),
            None if patches is None else below(suite, patches),
            have,
            self._selection.indexes == "zstd",
        )

    # What they name.

    def _contents(self, indexes: Sequence[Index]) -> Iterator[Wanted]:
        """Yield what the indexes name; a file may be named several times."""
        count = 0
        own = OwnNames(
            {each.suite.directory: each.suite for each in indexes}.values(),
            (form for index in indexes for form in index.forms),
        )
        for index in indexes:
            for each in named_by(self._destination, index):
                if index.kind != "patches":
                    own.check(each, index.path)
                count += 1
                if count > MAX_NAMED:
                    raise BadEntry(f"the indexes name more than {MAX_NAMED} files; no archive does")
                yield each

    def _named(self, indexes: Sequence[Index], further: Sequence[Wanted]) -> Iterator[str]:
        """In the thread: yield the paths of all that is kept."""
        return (each.path for each in chain(self._contents(indexes), further))

    # Publication.

    def _publish(
        self,
        suites: Sequence[Suite],
        indexes: Sequence[Index],
        apart: Sequence[Index],
        own: dict[str, bytes],
    ) -> None:
        """In the thread: names by hash, indexes, release files; and nothing stays that is of before."""
        destination = self._destination
        # One that is there already stays as old as it is: readers ask whether it has changed since.
        destination.stage(
            {path: d for path, d in own.items() if destination.read(path, len(d)) != d}
        )
        forms = [form for index in indexes for form in index.forms]
        for form in forms:
            if form.remote is not None:
                destination.link(form.path, form.remote)
        # A form that is not kept any more would stand beside a release file that says something else of it;
        # one that was not kept, beside the release file of before. Where names are hashes, those are enough.
        late = {
            form.path for form in forms if form.remote is not None and self._is_new(form, suites)
        }
        early = [form.path for form in forms if form.path not in late]
        stays = {base_of(index.path) for index in apart}
        kept = {form.path for form in forms} | own.keys()

        def delete(paths: Iterable[str]) -> None:
            for path in paths:
                if path not in kept and base_of(path) not in stays:
                    destination.delete(path)

        delete(chain.from_iterable(_before(suite) for suite in suites if _has_hashes(suite)))
        destination.release([*early, *own, *sorted(late)])
        delete(chain.from_iterable((*_before(suite), *map(suite.place, OWN)) for suite in suites))
        destination.clear_staged()

    def _is_new(self, form: Wanted, suites: Sequence[Suite]) -> bool:
        """Whether a form of an index has not been there, where there was a release file."""
        is_there = os.path.lexists(self._destination.where(form.path))
        return not is_there and any(map(_has_hashes, suites))


def _further(indexes: Sequence[Index], own: dict[str, bytes]) -> Iterator[Wanted]:
    """Yield what is kept besides what the indexes name."""
    for index in indexes:
        yield from index.forms
    for path, data in own.items():
        yield Wanted(path, len(data), "sha256", sha256(data).digest())


def _checked_name(name: str, check: Callable[[str], T]) -> T:
    try:
        return check(name)
    except BadEntry:
        raise UsageError(
            f"{quoted(name)} is no suite, component or architecture that can be mirrored; the suite of a flat"
            " archive ends in a slash, such as ./"
        ) from None


def _before(suite: Suite) -> list[str]:
    """Return where forms of packages and sources have been, by the release file of before."""
    paths = [below(suite, form).path for form in _main_forms(suite.before)]
    return [*paths, *(path + compressed.ENDING for path in paths)]


def _has_hashes(suite: Suite) -> bool:
    """Whether readers of either release file, that of before and that of now, look under hashes first."""
    return suite.before is not None and suite.before.by_hash and suite.release.by_hash


def _main_forms(release: Release | None) -> Iterator[Wanted]:
    """Yield the packed and unpacked forms of what packages and sources were named by."""
    for path, form in release.files.items() if release is not None else ():
        if names_packages(path):
            yield form


def _names_by_hash(suites: Sequence[Suite], indexes: Sequence[Index]) -> Iterator[str]:
    """Yield the names by hash, of now and of before: who has read the old release file still looks there."""
    for index in indexes:
        for form in index.forms:
            if form.remote is not None:
                yield form.remote
    kept = {form.path for index in indexes for form in index.forms}
    for suite in suites:
        if suite.before is None or not suite.before.by_hash:
            continue
        for form in suite.before.files.values():
            place = suite.place(form.path)
            old = by_hash(place, form)
            if old is not None and place in kept:
                yield old


def names_by_hash(destination: Destination, entries: Sequence[Wanted]) -> Iterator[tuple[str, str]]:
    """
    Yield each index's path, and its name by hash, of suites that have such names; see ``Destination.link``.

    Args:
        entries: what an archive holds, all of it there, or staged.
    """
    for own in entries:
        directory, _, name = own.path.rpartition("/")
        if name not in ("InRelease", "Release"):
            continue
        data = destination.read(f"{STAGED}/{own.path}", MAX_RELEASE_BYTES)
        if data is None:
            data = destination.read(own.path, MAX_RELEASE_BYTES)
        try:
            release = read_release(unsigned_part(data or b""), own.path)
        except BadEntry:  # beside an index there may be one that says what is in that
            continue
        suite = Suite(directory, release, {}, None)
        for each in entries if release.by_hash else ():
            named = release.files.get(suite.within(each.path))
            other = by_hash(each.path, each)
            if other is not None and named is not None and named.digest == each.digest:
                yield each.path, other

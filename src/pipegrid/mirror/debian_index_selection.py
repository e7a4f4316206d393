"""
Selection from a Debian archive: which indexes of its suites are kept, in which forms, and which of their
entries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from os.path import dirname
from typing import Literal, NamedTuple

from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    quoted,
)
from pipegrid.mirror.debian_index_update import by_hash
from pipegrid.mirror.debian_metadata import (
    MAX_RELEASE_BYTES,
    DescribedEntry,
    Release,
    described,
    packages,
    read_patch_index,
    sources,
)
from pipegrid.mirror.debian_release_files import Suite
from pipegrid.mirror.decompression import check_index_bytes, index_blocks
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.package_filter import (
    ALL,
    Matches,
    PackageFilter,
    Selector,
    SourcesOf,
    compare_debian,
    select,
)

HELD = (".xz", ".gz")
"""The packed forms in which an index is kept, if the archive has them; the first form that exists is read."""


READ = (*HELD, ".zst", ".bz2", "")
_PATCHES = ".diff/Index"
KeptForm = Literal["packed", "unpacked", "zstd"]


class Selection(NamedTuple):
    """
    The wanted parts of an archive.

    Attributes:
        suites: such as ``sid`` or ``bookworm/updates``; flat ones end in ``/``, and have neither components
            nor architectures.
        components: such as ``main``; empty: all in the release file.
        architectures: of binary packages, such as ``amd64``.
        with_sources: also mirror sources.
        with_patches: also mirror the patches of the indexes, for clients.
        also: patterns of further files in the release file, such as ``main/i18n/Translation-en.*``. Indexes
            of packages and sources are never included, lists of patches only ``with_patches``.
        indexes: the form in which indexes are kept: ``packed`` as in the archive, ``unpacked``, or ``zstd``
            (compressed here). Patches can bring only the last two up to date.
        filter: which packages and sources of the indexes are wanted; if it has ``sources``, indexes of
            sources are mirrored even without ``with_sources``.
    """

    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ("amd64",)
    with_sources: bool = False
    with_patches: bool = False
    also: tuple[str, ...] = ()
    indexes: KeptForm = "packed"
    filter: PackageFilter = ALL


class Index:
    """
    An index that is kept.

    Attributes:
        kind: the kind of its entries; "": it is not read.
        forms: the kept files; the first is the one that is read.
        size: unpacked, in bytes; None if unknown.
        fallbacks: if mirrors have none of ``forms``, one of these suffices; the best first.
        held: the form in which the index is kept.
        filters: an entry is wanted if any of these selects it; None: all entries are wanted.
        stays: the file of an entry is not removed if any of these selects the entry; None: all files stay.
        package_indexes: for an index of sources, the suite's indexes of packages.
    """

    def __init__(
        self,
        suite: Suite,
        kind: Literal["packages", "sources", "patches", ""],
        forms: list[ArchiveFile],
        size: int | None = None,
        fallbacks: Sequence[ArchiveFile] = (),
        held: KeptForm = "packed",
    ) -> None:
        self.suite = suite
        self.kind = kind
        self.forms = forms
        self.wanted_path = forms[0].path
        self.size = size
        self.fallbacks = fallbacks
        self.held = held
        self.filters: tuple[PackageFilter, ...] | None = None
        self.stays: tuple[PackageFilter, ...] | None = None
        self.package_indexes: Sequence[Index] = ()

    @property
    def path(self) -> str:
        return self.forms[0].path


def below(suite: Suite, file: ArchiveFile) -> ArchiveFile:
    """
    Return a file that the release file names, with its path in the archive; it is fetched by hash if
    possible, as by apt.
    """
    path = suite.place(file.path)
    names = hashed_names(suite, suite.release, path)
    return file.replaced(path=path, remote=names[-1] if names else None)


def hashed_names(suite: Suite, release: Release | None, path: str) -> list[str]:
    """
    Return the names of an index by hash: one for each hash in the release file, the strongest last.

    Args:
        release: the suite's current or previous release file.
        path: of the index, in the archive.
    """
    inner = suite.within(path)
    if release is None or not release.by_hash or inner not in release.files:
        return []
    names = (by_hash(path, *each) for each in release.digests_of(inner))
    return [name for name in names if name is not None]


def indexes_of(suite: Suite, selection: Selection, absent: list[str]) -> Iterator[Index]:
    """
    Yield the indexes to keep, each once.

    Args:
        absent: gets a sentence for each wanted item that the release file does not name.

    Raises:
        MirrorError: an index cannot be kept in the wanted form.
        BadEntry: the stated size of an index is too large.
    """
    release = suite.release
    seen: set[str] = set()
    for kind, base in _chosen(suite, selection):
        if not _is_named(release, base):
            absent.append(_not_named(suite, base))
            continue
        index = index_of(suite, kind, base, selection.indexes)
        if index.path in seen:
            continue
        seen.update(each.path for each in index.forms)
        yield index
        patches = f"{base}.diff/Index"
        if selection.with_patches and patches in release.files:
            each = below(suite, release.files[patches])
            seen.add(each.path)
            yield Index(suite, "patches", [each], MAX_RELEASE_BYTES)
    _check_also(release, selection)
    for path, file in release.files.items():
        each = below(suite, file)
        if each.path not in seen and _is_wanted_also(path, release, selection):
            yield further_index(suite, each)


def check_selected(suites: Sequence[Suite], selection: Selection) -> None:
    """
    Check that each named component and architecture has an index in at least one suite.

    Some combinations may have no index: ``main/debian-installer`` has no sources.

    Raises:
        MirrorError: a component or architecture has no index at all, perhaps because of a typing error; or
            nothing was selected.
    """
    named: set[str] = set()
    absent: dict[str, tuple[Suite, str]] = {}
    for suite in suites:
        for kind, base in _chosen(suite, selection):
            above, _, last = os.path.dirname(base).rpartition("/")
            keys = {base} if suite.is_flat else {above, last if kind == "packages" else "*"}
            if _is_named(suite.release, base):
                named |= keys
            for key in keys:
                absent.setdefault(key, (suite, base))
    for key, (suite, base) in absent.items():
        if key not in named and key != "*":
            raise MirrorError(_not_named(suite, base))
    if not named:
        for suite, base in absent.values():
            raise MirrorError(_not_named(suite, base))
        raise MirrorError(
            f"the release file of {suites[0].shown_name} names no indexes, so there is nothing to mirror;"
            " give --component, --arch or --source"
        )


def further_index(suite: Suite, file: ArchiveFile) -> Index:
    """Return the ``Index`` for a file of the release file that is not an index of packages or sources."""
    if file.path.endswith(_PATCHES):
        return Index(suite, "patches", [file], MAX_RELEASE_BYTES)
    return Index(suite, "", [file])


def _chosen(
    suite: Suite, selection: Selection
) -> Iterator[tuple[Literal["packages", "sources"], str]]:
    """
    Yield the kind and the unpacked path, below the suite, of each wanted index; the release file may lack
    some of them.

    For a flat suite, at least one index is yielded, so that a missing one is noticed.
    """
    release = suite.release
    with_sources = selection.with_sources or selection.filter.sources
    if suite.is_flat:
        with_sources = with_sources and _is_named(release, "Sources")
        if not with_sources or _is_named(release, "Packages"):
            yield "packages", "Packages"
        if with_sources:
            yield "sources", "Sources"
        return
    for given in selection.components or release.components:
        component = _place_of_component(release, given)
        for name in selection.architectures:
            yield "packages", f"{component}/binary-{name}/Packages"
        # apt requests this index in addition to the index of its own architecture.
        apart = f"{component}/binary-all/Packages"
        if selection.architectures and release.all_apart and _is_named(release, apart):
            yield "packages", apart
        if with_sources:
            yield "sources", f"{component}/source/Sources"


def _place_of_component(release: Release, component: str) -> str:
    """
    Return the directory of a component's indexes: Debian's security archive names the component
    ``updates/main``, but the directory ``main``.
    """
    short = component.rpartition("/")[2]
    if short != component:
        places = {path.partition("/")[0] for path in release.files}
        if short in places and component.partition("/")[0] not in places:
            return short
    return component


def _is_named(release: Release, base: str) -> bool:
    return any(base + ending in release.files for ending in READ)


def names_packages(path: str) -> bool:
    """Return whether a path is that of an index of packages or sources, in any form."""
    name = path.rpartition("/")[2].partition(".")[0]
    return name in ("Packages", "Sources") and ".diff/" not in path


def base_of(path: str) -> str:
    """Return the path of an index without the ending of its compression."""
    above, slash, name = path.rpartition("/")
    return f"{above}{slash}{name.partition('.')[0]}"


def _check_also(release: Release, selection: Selection) -> None:
    """Raise MirrorError if a pattern of ``also`` matches only indexes of packages or sources."""
    for pattern in selection.also:
        matched = [path for path in release.files if fnmatchcase(path, pattern)]
        if matched and all(map(names_packages, matched)):
            raise MirrorError(
                f"{quoted(pattern)} names indexes of packages only, which are kept with their packages; say"
                f" which by component (here {dirname(dirname(matched[0])) or '.'}) and architecture"
            )


def _is_wanted_also(path: str, release: Release, selection: Selection) -> bool:
    # Published indexes must not name files that are not fetched.
    if names_packages(path) or (path.endswith(_PATCHES) and not selection.with_patches):
        return False
    # Release files also name unpacked forms, which archives do not have.
    if any(path + ending in release.files for ending in READ if ending):
        return False
    return any(fnmatchcase(path, pattern) for pattern in selection.also)


def index_of(
    suite: Suite,
    kind: Literal["packages", "sources"],
    base: str,
    held: KeptForm,
    endings_here: Sequence[str] = HELD,
) -> Index:
    """
    Return the ``Index`` for an index of packages or sources that the release file names.

    Args:
        endings_here: which packed forms are kept, if the archive has them.

    Raises:
        MirrorError: the index cannot be kept in the wanted form.
        BadEntry: the stated size of the index is too large.
    """
    named = suite.release.files
    endings = [ending for ending in READ if base + ending in named]
    kept = [ending for ending in endings if ending in endings_here] or endings[:1]
    if held != "packed":
        if base not in named:
            raise MirrorError(
                f"the release file of {suite.shown_name} does not give the hash of {base} unpacked, so no "
                "client could use it; keep indexes packed"
            )
        kept = [""]
    size = named[base].size if base in named else None
    forms = [below(suite, named[base + each]) for each in kept]
    fallbacks = [below(suite, named[base + each]) for each in endings if each not in kept]
    largest = max(size or 0, *(form.size or 0 for form in forms))
    check_index_bytes(base, largest)
    return Index(suite, kind, forms, size, () if held != "packed" else fallbacks, held)


def _not_named(suite: Suite, base: str) -> str:
    told = f"the release file of {suite.shown_name} names no {base}"
    if suite.is_flat:
        return f"{told}, so that apt could not use it, either; is it that of a flat archive?"
    return (
        f"{told}; it has the components {' '.join(suite.release.components)} and the architectures"
        f" {' '.join(suite.release.architectures)}"
    )


def named_by(
    destination: Destination,
    index: Index,
    skip: Skip | None = None,
    matches: Matches | None = None,
    stays: bool = False,
) -> Iterator[ArchiveFile]:
    """
    Yield the files of the entries of a staged index that its filters select.

    Args:
        skip: called with the reason for each unusable entry; None: unusable entries are ignored.
        matches: records what the filters of this run have matched.
        stays: use the index's ``stays`` instead of its ``filters``.

    Raises:
        BadEntry: the index cannot be read, or is too long.
    """
    if not index.kind:
        return
    filters = index.stays if stays else index.filters
    if filters is not None and index.kind != "patches":
        for entry in selected_by(destination, index, filters, skip, matches):
            yield from entry.files
        return
    blocks = index_blocks(destination.staged_path(index.path), index.path, index.size)
    if index.kind == "patches":
        directory = index.path.rpartition("/")[0]
        found = read_patch_index(b"".join(map(bytes, blocks)), directory, index.path)
        yield from (step.packed for step in found.steps if step.packed is not None)
    else:
        read = packages if index.kind == "packages" else sources
        yield from read(blocks, index.path, skip or ignore_entry)


def selected_by(
    destination: Destination,
    index: Index,
    filters: Sequence[PackageFilter],
    skip: Skip | None = None,
    matches: Matches | None = None,
) -> Iterator[DescribedEntry]:
    """
    Yield the packages or sources of a staged index that any of ``filters`` selects. ``skip`` and ``matches``
    are the same as for ``named_by``.

    Raises:
        BadEntry: as for ``named_by``.
    """
    blocks = index_blocks(destination.staged_path(index.path), index.path, index.size)
    entries = described(blocks, index.kind, index.path, skip or ignore_entry)
    if matches is not None and not (index.kind == "sources" and matches.wanted.sources):
        entries = matches.noting(entries)
    matching: set[tuple[str, str]] = set()
    if index.kind == "sources":
        for each in filters:
            if each.sources and not index.package_indexes:
                filters = (ALL,)  # without indexes of packages, all sources are kept
                break
            for packages_index in index.package_indexes if each.sources else ():
                found = selected_by(destination, packages_index, (each,))
                matching.update(entry.about.source for entry in found)
    chosen: list[Selector] = [
        each for each in filters if not (each.sources and index.kind == "sources")
    ]
    if matching:
        chosen.append(SourcesOf(frozenset(matching)))
    for _, entry in select(entries, chosen, compare_debian):
        if matches is not None:
            matches.selected += 1
        yield entry


def ignore_entry(_: BadEntry) -> None:
    """Do nothing: the entry is reported when the index is read another time."""

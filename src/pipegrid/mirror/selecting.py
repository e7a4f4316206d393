"""
What of a Debian archive is mirrored: which indexes of its suites, in which forms, and what they name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from os.path import dirname
from typing import Literal, NamedTuple

from pipegrid.mirror.bounded import check_index_bytes, index_blocks
from pipegrid.mirror.deb822 import MAX_RELEASE_BYTES, Release, packages, read_patch_index, sources
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.indexes import by_hash
from pipegrid.mirror.suites import Suite
from pipegrid.mirror.wanted import BadEntry, MirrorError, Skip, Wanted, quoted

HELD = (".xz", ".gz")
"""The forms in which an index is kept, where the archive has them; the first is the one that is read."""

READ = (*HELD, ".zst", ".bz2", "")

_PATCHES = ".diff/Index"


KeptForm = Literal["packed", "unpacked", "zstd"]


class Selection(NamedTuple):
    """
    What of an archive is wanted.

    Attributes:
        suites: such as ``sid`` or ``bookworm/updates``; flat ones end in ``/``, and have neither components
            nor architectures.
        components: such as ``main``; empty: all that the release names.
        architectures: of binary packages, such as ``amd64``.
        with_sources: sources, too.
        with_patches: also the patches of the indexes, for readers.
        also: patterns of further files that the release file names, such as ``main/i18n/Translation-en.*``;
            no indexes of packages, and lists of patches only ``with_patches``.
        indexes: in which form indexes are kept: as the archive packs them; or unpacked, or compressed
            here, which patches bring up to date.
    """

    suites: tuple[str, ...]
    components: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ("amd64",)
    with_sources: bool = False
    with_patches: bool = False
    also: tuple[str, ...] = ()
    indexes: KeptForm = "packed"


class Index:
    """
    An index to be kept.

    Attributes:
        kind: how it is read; "": it is not.
        forms: as they are kept; the first is the one that is read.
        size: unpacked, in bytes; None: not known.
        spare: forms of which one does if mirrors have none of ``forms``, the best first.
        held: in which form it is kept.
    """

    def __init__(
        self,
        suite: Suite,
        kind: Literal["packages", "sources", "patches", ""],
        forms: list[Wanted],
        size: int | None = None,
        spare: Sequence[Wanted] = (),
        held: KeptForm = "packed",
    ) -> None:
        self.suite = suite
        self.kind = kind
        self.forms = forms
        self.wanted_path = forms[0].path
        self.size = size
        self.spare = spare
        self.held = held

    @property
    def path(self) -> str:
        return self.forms[0].path


def below(suite: Suite, file: Wanted) -> Wanted:
    """Return a file of the release file as it is in the archive; by the hash that apt asks for, if so."""
    path = suite.place(file.path)
    names = hashed_names(suite, suite.release, path)
    return file.but(path=path, remote=names[-1] if names else None)


def hashed_names(suite: Suite, release: Release | None, path: str) -> list[str]:
    """
    Return the names of an index that are its hashes: one for each that is told, the strongest last.

    Args:
        release: that of now, or that of before, which may be another.
        path: in the archive.
    """
    inner = suite.within(path)
    if release is None or not release.by_hash or inner not in release.files:
        return []
    names = (by_hash(path, *each) for each in release.digests_of(inner))
    return [name for name in names if name is not None]


def indexes_of(
    suite: Suite, selection: Selection, absent: list[str] | None = None
) -> Iterator[Index]:
    """
    Yield the indexes to be kept, each once.

    Args:
        absent: is given what was wanted and the release file does not name, in a sentence each; None: that
            is an error.

    Raises:
        MirrorError: an index cannot be kept as was wanted.
        BadEntry: one is said to be larger than any index is.
    """
    release = suite.release
    seen: set[str] = set()
    for kind, base in (
        _chosen_flat(release, selection) if suite.is_flat else _chosen(release, selection)
    ):
        if not _is_named(release, base):
            if absent is None:
                raise MirrorError(_not_named(suite, base))
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
    Look that each component and architecture that was named has an index in one suite at least.

    Combinations of them may lack one, as ``main/debian-installer`` has no sources.

    Raises:
        MirrorError: one has none at all, perhaps for a slip in its name; or nothing was selected.
    """
    named: set[str] = set()
    absent: dict[str, tuple[Suite, str]] = {}
    for suite in suites:
        chosen = _chosen_flat if suite.is_flat else _chosen
        for kind, base in chosen(suite.release, selection):
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


def further_index(suite: Suite, file: Wanted) -> Index:
    """Return a file that the release file names and that is no index of packages or sources."""
    if file.path.endswith(_PATCHES):
        return Index(suite, "patches", [file], MAX_RELEASE_BYTES)
    return Index(suite, "", [file])


def _chosen(
    release: Release, selection: Selection
) -> Iterator[tuple[Literal["packages", "sources"], str]]:
    """Yield which indexes are wanted, unpacked, by path below the suite; the release may name no such."""
    for given in selection.components or release.components:
        component = _place_of_component(release, given)
        for name in selection.architectures:
            yield "packages", f"{component}/binary-{name}/Packages"
        # What apt asks for beside the index of its own architecture.
        apart = f"{component}/binary-all/Packages"
        if selection.architectures and release.all_apart and _is_named(release, apart):
            yield "packages", apart
        if selection.with_sources:
            yield "sources", f"{component}/source/Sources"


def _chosen_flat(
    release: Release, selection: Selection
) -> Iterator[tuple[Literal["packages", "sources"], str]]:
    """Yield what a flat suite has: packages, and sources if it has any; one of them it must have."""
    sources_too = selection.with_sources and _is_named(release, "Sources")
    if not sources_too or _is_named(release, "Packages"):
        yield "packages", "Packages"
    if sources_too:
        yield "sources", "Sources"


def _place_of_component(release: Release, component: str) -> str:
    """Return where its indexes are: Debian's archive of updates says ``updates/main``, and has ``main``."""
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
    """Return the path of an index without what says how it is packed."""
    above, slash, name = path.rpartition("/")
    return f"{above}{slash}{name.partition('.')[0]}"


def _check_also(release: Release, selection: Selection) -> None:
    """Raise MirrorError if somebody wants the index of packages, and not what it names."""
    for pattern in selection.also:
        matched = [path for path in release.files if fnmatchcase(path, pattern)]
        if matched and all(map(names_packages, matched)):
            raise MirrorError(
                f"{quoted(pattern)} names indexes of packages only, which are kept with their packages; say"
                f" which by component (here {dirname(dirname(matched[0])) or '.'}) and architecture"
            )


def _is_wanted_also(path: str, release: Release, selection: Selection) -> bool:
    # What is not there must not be named by what is.
    if names_packages(path) or (path.endswith(_PATCHES) and not selection.with_patches):
        return False
    # Archives name what packed forms hold as well, and do not have it.
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
    Return an index that the release file names.

    Args:
        endings_here: which packed forms are kept, if it has them.

    Raises:
        MirrorError: it cannot be kept in the form that is wanted.
        BadEntry: it is said to be larger than any index is.
    """
    named = suite.release.files
    endings = [ending for ending in READ if base + ending in named]
    kept = [ending for ending in endings if ending in endings_here] or endings[:1]
    if held != "packed":
        if base not in named:
            raise MirrorError(
                f"the release file of {suite.shown_name} does not tell the hash of {base} unpacked,"
                " so that nobody could use it; keep indexes packed"
            )
        kept = [""]
    size = named[base].size if base in named else None
    forms = [below(suite, named[base + each]) for each in kept]
    spare = [below(suite, named[base + each]) for each in endings if each not in kept]
    largest = max(size or 0, *(form.size or 0 for form in forms))
    check_index_bytes(base, largest)
    return Index(suite, kind, forms, size, () if held != "packed" else spare, held)


def _not_named(suite: Suite, base: str) -> str:
    told = f"the release file of {suite.shown_name} names no {base}"
    if suite.is_flat:
        return f"{told}, so that apt could not use it, either; is it that of a flat archive?"
    return (
        f"{told}; it has the components {' '.join(suite.release.components)} and the architectures"
        f" {' '.join(suite.release.architectures)}"
    )


def named_by(destination: Destination, index: Index, skip: Skip | None = None) -> Iterator[Wanted]:
    """
    Yield what a staged index names.

    Args:
        skip: is called with the reason of each entry that cannot be used; None: these say nothing.

    Raises:
        BadEntry: it cannot be read, or has more bytes than it should.
    """
    if not index.kind:
        return
    blocks = index_blocks(destination.staged_path(index.path), index.path, index.size)
    if index.kind == "patches":
        directory = index.path.rpartition("/")[0]
        found = read_patch_index(b"".join(map(bytes, blocks)), directory, index.path)
        yield from (step.packed for step in found.steps if step.packed is not None)
    else:
        read = packages if index.kind == "packages" else sources
        yield from read(blocks, index.path, skip or ignore_entry)


def ignore_entry(_: BadEntry) -> None:
    """An entry that cannot be used, of which somebody else has heard."""

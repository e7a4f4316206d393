"""Suites of a Debian archive: their release files, and the indexes that are selected from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from io import BytesIO
from itertools import zip_longest
from os.path import dirname
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    MirrorError,
    Skip,
    casefold_path,
    check_path,
    quoted,
)
from pipegrid.mirror.deb822 import (
    MAX_RELEASE_BYTES,
    DescribedEntry,
    Release,
    described,
    packages,
    read_patch_index,
    read_release,
    sources,
)
from pipegrid.mirror.decompress import check_index_bytes, index_blocks
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.indexes import by_hash
from pipegrid.mirror.package_filter import (
    ALL,
    Matches,
    PackageFilter,
    Selector,
    SourcesOf,
    compare_debian,
    select,
)
from pipegrid.mirror.signatures import (
    MAX_SIGNATURE_BYTES,
    MESSAGE,
    Keys,
    check_signature,
    signed_content,
    signed_parts,
    unescaped,
)

if TYPE_CHECKING:
    from pipegrid.mirror.destination import Destination
    from pipegrid.mirror.indexes import ArchiveMirror


# The suites of a Debian archive, by their release files: fetched from a mirror, believed if they are signed.
#
# A suite whose name ends in a slash is flat: its release file and its indexes are in one directory, that
# of its name, and no component is. What they name is below the archive all the same, as with any suite.

MAX_AHEAD = timedelta(hours=1)
"""
How far an archive's clock may be ahead of ours. apt takes ten seconds, but what it refuses now it reads a
minute later. With a clock that is further behind nobody could tell what has expired.
"""


class Suite(NamedTuple):
    """
    One suite as one mirror has it, and as it was here: release files by name, and what they say.

    Attributes:
        directory: below the archive; "": the archive itself.
        is_flat: it has no components.
    """

    directory: str
    release: Release
    files: dict[str, bytes]
    before: Release | None
    is_flat: bool = False

    @property
    def shown_name(self) -> str:
        """How it is called in sentences."""
        return self.directory or "./"

    def place(self, path: str) -> str:
        """Return where in the archive a path is that its release file names."""
        return f"{self.directory}/{path}" if self.directory else path

    def within(self, path: str) -> str:
        """Return how its release file names a path of the archive."""
        return path.removeprefix(f"{self.directory}/") if self.directory else path


def canonical(suite: str) -> str:
    """
    Return the one name of a suite; a flat one may be called in several ways, as in apt's list of sources.

    Raises:
        BadEntry: it cannot be one.
    """
    if not suite.endswith("/"):
        check_path(suite)
        return suite
    parts = [part for part in suite.split("/") if part not in ("", ".")]
    if parts:
        check_path("/".join(parts))
    return "/".join((*(parts or "."), ""))


def _directory_of(suite: str) -> str:
    """Return where the release file of a suite is, by its one name."""
    if suite.endswith("/"):
        return suite.rstrip("/") if suite != "./" else ""
    return f"dists/{suite}"


OWN = ("Release", "Release.gpg", "InRelease")
"""Release files, in the order in which they are to be seen."""


_PACKAGE = re.compile(r".+\.(?:[udt]?deb|dsc|tar|tar\.[a-z0-9]+|diff\.gz|asc)")
"""What ends so can be a package or a part of a source; no index or release file does."""

_INDEX = re.compile(
    r"(?:.*/)?(?:(?:in)?release(?:\.gpg)?|(?:packages|sources)(?:\.(?:xz|gz|zst|bz2|diff/.*))?|by-hash/.*)"
)
"""What is called so outside of ``dists`` belongs to a flat suite, perhaps to one that another run keeps."""


def in_order(paths: Iterable[str]) -> list[str]:
    """Return paths that are to go in the order in which they may: what names packages before any of these."""
    return sorted(paths, key=lambda path: not _may_name_packages(casefold_path(path)))


def remove_in_order(destination: Destination, paths: Iterable[str]) -> None:
    """
    Remove files of an archive, each as ``Destination.delete`` does.

    Raises:
        MirrorError: one cannot be removed; those that were to go after it are still there.
    """
    for path in in_order(paths):
        destination.delete(path)


def _may_name_packages(place: str) -> bool:
    if place.partition("/")[0] in ("dists", "repodata"):
        return _PACKAGE.fullmatch(place) is None
    return _INDEX.fullmatch(place) is not None


class OwnNames:
    """
    The names of release files and indexes, which no package may have; but packages may stand beside them.

    Args:
        suites: that one run mirrors; others may be in the same archive.
        kept: what of them it keeps. The release file of a flat suite may name packages as well.
    """

    def __init__(self, suites: Iterable[Suite], kept: Iterable[ArchiveFile]) -> None:
        self._named = {
            casefold_path(suite.place(path)) for suite in suites for path in suite.release.files
        }
        self._kept = {casefold_path(each.path): each for each in kept}

    def refusal(self, file: ArchiveFile, index: str) -> BadEntry | None:
        """Return why a package may not be called as ``index`` names it; None: it may be."""
        path = file.path
        if path.startswith("pool/") and path.endswith(".deb"):  # most are
            return None
        place = casefold_path(path)
        is_package = _PACKAGE.fullmatch(place) is not None
        if place.partition("/")[0] == "dists":
            wrong = place in self._named or not is_package
        elif is_package:
            other = self._kept.get(place, file)
            wrong = (other.path, other.digest) != (path, file.digest)
        else:
            wrong = place in self._named or _INDEX.fullmatch(place) is not None
        if not wrong:
            return None
        return BadEntry(
            f"{index} names the package {quoted(path)}, where only indexes and release files may be"
        )


def own_files(suite: Suite) -> dict[str, bytes]:
    return {suite.place(name): suite.files[name] for name in OWN if name in suite.files}


def _check_not_older(
    before: Release | None, release: Release, name: str, ignores_dates: bool
) -> None:
    """Whoever offers an older release than we have is behind, or hides something."""
    if before is None or before.date is None:
        return
    if release.date is None:
        if ignores_dates:
            return
        raise MirrorError(f"{name} has no date, and what is here has one")
    if release.date < before.date:
        raise MirrorError(
            f"{name} is of {release.date:%Y-%m-%d %H:%M:%S}, older than what is here, of"
            f" {before.date:%Y-%m-%d %H:%M:%S}"
        )


def _check_dates(release: Release, now: datetime, name: str) -> None:
    """Raise MirrorError for one that has expired, or is of the future."""
    until, date = release.valid_until, release.date
    if until is not None and until < now:
        raise MirrorError(
            f"{name} is stale: it was valid until {until.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
            " (--ignore-dates mirrors it nevertheless)"
        )
    if date is not None and date > now + MAX_AHEAD:
        raise MirrorError(
            f"{name} is of {date.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC, which is in the future; "
            "check the clock of this machine (--ignore-dates mirrors it nevertheless)"
        )


def _says_the_same(plain: bytes, content: bytes) -> bool:
    """Return whether a text is the one that was signed, but for blanks at ends of lines."""
    if plain == content:
        return True
    lines = zip_longest(BytesIO(plain.strip()), BytesIO(content.strip()), fillvalue=b"")
    return all(one.rstrip() == other.rstrip() for one, other in lines)


def unsigned_part(data: bytes) -> bytes:
    """Return what a signed file says, without asking who says it."""
    if not data.startswith(MESSAGE):
        return data
    parts = signed_parts(data)
    if parts is not None:
        return unescaped(parts[0])
    content, _, _ = data.partition(b"\n\n")[2].partition(b"\n-----BEGIN PGP SIGNATURE-----")
    return unescaped(content) + b"\n"


class Suites:
    """
    Where suites are looked for.

    Args:
        now: for the dates of release files.
        ignores_dates: as of ``DebianArchive``.
    """

    def __init__(
        self,
        mirror: ArchiveMirror,
        keys: Keys,
        now: datetime | None = None,
        ignores_dates: bool = False,
    ) -> None:
        self._mirror = mirror
        self._destination = mirror.destination
        self._keys = keys
        self._now = now or datetime.now(timezone.utc)
        self._ignores_dates = ignores_dates

    async def find(self, suite: str, skip: Skip) -> Suite:
        """
        Return a suite as the first mirror has it that can be believed.

        Args:
            skip: is called with the reason of each line of its release file that cannot be used.

        Raises:
            MirrorError: none can.
        """
        reasons: list[str] = []
        for number in range(self._mirror.count):
            found = await self._try(number, suite, reasons, skip)
            if found is not None:
                return found
        raise MirrorError(
            f"no mirror has a release file of {quoted(suite)} that can be trusted: {'; '.join(reasons)}"
        )

    async def _try(self, number: int, suite: str, reasons: list[str], skip: Skip) -> Suite | None:
        try:
            return await self._ask(number, suite, skip)
        except (MirrorError, BadEntry) as error:
            reasons.append(str(error))
            return None

    async def _ask(self, number: int, suite: str, skip: Skip) -> Suite:
        directory = _directory_of(suite)
        prefix = directory and f"{directory}/"
        answers = await self._mirror.small_files(number).fetch_all(
            (
                (f"{prefix}InRelease", MAX_RELEASE_BYTES),
                (f"{prefix}Release", MAX_RELEASE_BYTES),
                (f"{prefix}Release.gpg", MAX_SIGNATURE_BYTES),
            )
        )
        found = {path.rpartition("/")[2]: data for path, data in answers.items()}
        url = self._mirror.url(number)
        if not found.keys() & {"InRelease", "Release"}:
            why = "".join(f" ({each})" for each in list(answers.refused.values())[:1])
            raise MirrorError(f"{url} has no {prefix}InRelease and no Release{why}")
        content, files, name = await self._mirror.run(self._believe, found, prefix, url)
        skipped: list[BadEntry] = []
        release = read_release(content, name, skipped.append, self._ignores_dates)
        if not self._ignores_dates:
            _check_dates(release, self._now, name)
        before = await self._mirror.run(self._before, prefix)
        _check_not_older(before, release, name, self._ignores_dates)
        for reason in skipped:
            skip(reason)
        return Suite(directory, release, files, before, suite.endswith("/"))

    def _believe(
        self, found: dict[str, bytes], prefix: str, url: str
    ) -> tuple[bytes, dict[str, bytes], str]:
        """
        In the thread: return what is signed, the files that say so, and the name of the one that is read.

        A mirror may change between one request and the next: a file that does not say the same is left out.
        """
        keys = self._keys
        inline, plain = found.get("InRelease"), found.get("Release")
        name = f"{prefix}InRelease of {url}"
        content = None
        if inline is not None:
            content = (
                unsigned_part(inline)
                if keys.allow_unsigned
                else signed_content(inline, keys.keyrings, name, self._mirror.is_stopped)
            )
        if plain is not None and (content is None or _says_the_same(plain, content)):
            if content is None:
                name = f"{prefix}Release of {url}"
            try:
                self._check_plain(plain, found.get("Release.gpg"), name)
            except MirrorError:
                if content is None:
                    raise
                del found["Release"]
        elif plain is not None:
            del found["Release"]
        if "Release" not in found:
            found.pop("Release.gpg", None)
        if content is None:
            content = plain
        assert content is not None
        return content, found, name

    def _check_plain(self, plain: bytes, signature: bytes | None, name: str) -> None:
        if self._keys.allow_unsigned:
            return
        if signature is None:
            raise MirrorError(f"{name} is not signed; nothing of it was used")
        check_signature(plain, signature, self._keys.keyrings, name, self._mirror.is_stopped)

    def _before(self, prefix: str) -> Release | None:
        """In the thread: return what the release file says that is here."""
        for own in ("InRelease", "Release"):
            data = self._destination.read(prefix + own, MAX_RELEASE_BYTES)
            if data is not None:
                try:
                    return read_release(
                        unsigned_part(data), own, lambda _: None, ignores_dates=True
                    )
                except BadEntry:
                    continue
        return None


# What of a Debian archive is mirrored: which indexes of its suites, in which forms, and what they name.

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
        filter: which packages of the indexes are wanted; sources, too, if it has ``sources``.
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
    An index to be kept.

    Attributes:
        kind: how it is read; "": it is not.
        forms: as they are kept; the first is the one that is read.
        size: unpacked, in bytes; None: not known.
        spare: forms of which one does if mirrors have none of ``forms``, the best first.
        held: in which form it is kept.
        filters: what it names is wanted if any of these selects it; None: all.
        stays: as ``filters``, for what is not to be removed.
        beside: of an index of sources, those of the packages that are built from them.
    """

    def __init__(
        self,
        suite: Suite,
        kind: Literal["packages", "sources", "patches", ""],
        forms: list[ArchiveFile],
        size: int | None = None,
        spare: Sequence[ArchiveFile] = (),
        held: KeptForm = "packed",
    ) -> None:
        self.suite = suite
        self.kind = kind
        self.forms = forms
        self.wanted_path = forms[0].path
        self.size = size
        self.spare = spare
        self.held = held
        self.filters: tuple[PackageFilter, ...] | None = None
        self.stays: tuple[PackageFilter, ...] | None = None
        self.beside: Sequence[Index] = ()

    @property
    def path(self) -> str:
        return self.forms[0].path


def below(suite: Suite, file: ArchiveFile) -> ArchiveFile:
    """Return a file of the release file as it is in the archive; by the hash that apt asks for, if so."""
    path = suite.place(file.path)
    names = hashed_names(suite, suite.release, path)
    return file.replaced(path=path, remote=names[-1] if names else None)


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


def further_index(suite: Suite, file: ArchiveFile) -> Index:
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
        if selection.with_sources or selection.filter.sources:
            yield "sources", f"{component}/source/Sources"


def _chosen_flat(
    release: Release, selection: Selection
) -> Iterator[tuple[Literal["packages", "sources"], str]]:
    """Yield what a flat suite has: packages, and sources if it has any; one of them it must have."""
    sources_too = selection.with_sources or selection.filter.sources
    sources_too = sources_too and _is_named(release, "Sources")
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
                f"the release file of {suite.shown_name} does not give the hash of {base} unpacked, so no "
                "client could use it; keep indexes packed"
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


def named_by(
    destination: Destination,
    index: Index,
    skip: Skip | None = None,
    matches: Matches | None = None,
    stays: bool = False,
) -> Iterator[ArchiveFile]:
    """
    Yield what a staged index names, as far as its filters select it.

    Args:
        skip: is called with the reason of each entry that cannot be used; None: these say nothing.
        matches: is given what the filters of this run have met.
        stays: its ``stays`` count in place of its ``filters``.

    Raises:
        BadEntry: it cannot be read, or has more bytes than it should.
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
    Yield those packages or sources of a staged index that any of some filters selects; else as ``named_by``.

    Raises:
        BadEntry: as ``named_by``.
    """
    blocks = index_blocks(destination.staged_path(index.path), index.path, index.size)
    entries = described(blocks, index.kind, index.path, skip or ignore_entry)
    if matches is not None and not (index.kind == "sources" and matches.wanted.sources):
        entries = matches.noting(entries)
    matching: set[tuple[str, str]] = set()
    if index.kind == "sources":
        for each in filters:
            if each.sources and not index.beside:
                filters = (ALL,)  # it is not known of what
                break
            for packages_index in index.beside if each.sources else ():
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
    """An entry that cannot be used, of which somebody else has heard."""

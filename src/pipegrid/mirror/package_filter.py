"""
Which packages of an index are wanted: by name, section, priority, architecture, and the newest versions.

Runs with different filters may share a destination, which records the filters of each index. So a run does
not remove what the filters of another run select, and of another run's index it fetches only what that run's
filters select. Without input or output, except for the records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cmp_to_key
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from pipegrid.mirror import HIDDEN
from pipegrid.mirror.archive_file import MirrorError, quoted
from pipegrid.mirror.destination import Destination

FILTERS = "filters"
"""In ``HIDDEN``: the recorded filters."""

MAX_RECORD_BYTES = 1 << 20
MAX_RECORDED = 64
"""Maximum number of filters that are recorded for one index; few runs share an index."""

MAX_NEWEST = 1000


class Description(NamedTuple):
    """
    A package as an index describes it.

    Attributes:
        section, priority: "" if the index gives none.
        source: name and version of its source package in Debian archives; the file name of its source package
            and "" in RPM repositories.
        is_modular: whether it belongs to a stream of a module; of such packages all versions are kept.
    """

    name: str
    architecture: str
    version: Any
    section: str = ""
    priority: str = ""
    source: tuple[str, str] = ("", "")
    is_modular: bool = False


class PackageFilter(NamedTuple):
    """
    Selects a package if every attribute that is not empty accepts it.

    Attributes:
        include, exclude: patterns of names.
        sections: patterns; the section ``contrib/net`` is also matched as ``net``.
        priorities: such as ``required``.
        architectures: of RPM packages.
        sources: also select the source packages of the selected packages; in Debian's indexes of sources,
            select only these. False: indexes of sources are filtered like indexes of packages.
        newest: how many of the highest versions of each name and architecture are kept; 0: all.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    priorities: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    sources: bool = False
    newest: int = 0

    @property
    def identity(self) -> PackageFilter:
        """
        The filter without ``newest``: filters that differ only in ``newest`` count as filters of the same
        run.
        """
        return self._replace(newest=0)

    def reasons(self, each: Description) -> Iterator[tuple[str, str]]:
        """Yield pairs of an option and its pattern, for each pattern that matches a package."""
        for option, patterns, texts in self._tests(each):
            for pattern in patterns:
                if any(fnmatchcase(text, pattern) for text in texts):
                    yield option, pattern

    def selects(self, each: Description) -> bool:
        """
        Return whether the filter selects a package; ``select`` decides how many versions of the package are
        kept.
        """
        for option, patterns, texts in self._tests(each):
            if patterns:
                found = any(fnmatchcase(text, pattern) for pattern in patterns for text in texts)
                if found == (option == "--exclude"):
                    return False
        return True

    def _tests(self, each: Description) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        yield "--include", self.include, (each.name,)
        yield "--exclude", self.exclude, (each.name,)
        if self.sections:
            yield "--section", self.sections, (each.section, each.section.rpartition("/")[2])
        if self.priorities:
            yield "--priority", self.priorities, (each.priority,)
        if self.architectures:
            yield "--arch", self.architectures, (each.architecture,)

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of an option and its pattern, for each pattern of the filter."""
        for option, patterns, _ in self._tests(Description("", "", "")):
            for pattern in patterns:
                yield option, pattern


ALL = PackageFilter()
"""Selects every package."""


class SourcesOf(NamedTuple):
    """Selects the sources that packages are built from, by name and version."""

    built_from: frozenset[tuple[str, str]]
    newest: int = 0

    def selects(self, each: Description) -> bool:
        """Return whether a source is the source of one of the packages."""
        return each.source in self.built_from


class SourceRpmsOf(NamedTuple):
    """Selects the source packages that RPM packages are built from, by their file names."""

    built_from: frozenset[str]
    architectures: tuple[str, ...]
    newest: int = 0

    def selects(self, each: Description) -> bool:
        """Return whether a package is one of these source packages."""
        return each.architecture in self.architectures and each.source[0] in self.built_from


Selector = PackageFilter | SourcesOf | SourceRpmsOf

T = TypeVar("T")
Compare = Callable[[Any, Any], int]
PackageEntry = tuple[Description, T]


class Matches:
    """
    What the filter of one run has matched.

    Attributes:
        selected: how many packages the filter selects.
        named: how many packages the indexes name.
    """

    def __init__(self, wanted: PackageFilter) -> None:
        self.wanted = wanted
        self.selected = 0
        self.named = 0
        self._unmatched = set(wanted.patterns())

    def note(self, each: Description) -> None:
        """Count a package of an index, and record which patterns match it."""
        self.named += 1
        if self._unmatched:
            self._unmatched.difference_update(self.wanted.reasons(each))

    def noting(self, entries: Iterable[PackageEntry[T]]) -> Iterator[PackageEntry[T]]:
        """Yield the packages of an index, and ``note`` each."""
        for each in entries:
            self.note(each[0])
            yield each

    def unmatched(self) -> list[tuple[str, str]]:
        """Return the options and patterns that have matched nothing, in the order of ``patterns``."""
        return [each for each in self.wanted.patterns() if each in self._unmatched]

    def check(self) -> None:
        """
        Check that the filter selects something.

        Raises:
            MirrorError: the indexes name packages, but the filter selects none.
        """
        if self.named and not self.selected:
            raise MirrorError(
                f"the filters select none of {self.named} packages; nothing was fetched or published"
            )


def select(
    entries: Iterable[PackageEntry[T]], filters: Sequence[Selector], compare: Compare
) -> Iterator[PackageEntry[T]]:
    """
    Yield the packages that any of the filters selects, in the order of ``entries``.

    Args:
        compare: returns whether one version is older than another (-1), the same (0) or newer (1).
    """
    if not any(each.newest for each in filters):
        for entry in entries:
            if any(each.selects(entry[0]) for each in filters):
                yield entry
        return
    kept: dict[int, PackageEntry[T]] = {}
    best = [_Newest(each.newest, compare) if each.newest else None for each in filters]
    for number, entry in enumerate(entries):
        for each, newest in zip(filters, best, strict=True):
            if each.selects(entry[0]):
                if newest is None:
                    kept[number] = entry
                else:
                    newest.add(number, entry)
    for newest in best:
        if newest is not None:
            kept.update(newest.kept())
    for number in sorted(kept):
        yield kept[number]


class _Newest:
    """Keeps the highest versions of each name and architecture."""

    def __init__(self, count: int, compare: Compare) -> None:
        self._count = count
        self._key = cmp_to_key(compare)
        self._always: list[tuple[int, Any]] = []
        self._groups: dict[tuple[str, str], dict[Any, list[tuple[int, Any]]]] = {}

    def add(self, number: int, entry: PackageEntry[Any]) -> None:
        about = entry[0]
        if about.is_modular:
            self._always.append((number, entry))
            return
        versions = self._groups.setdefault((about.name, about.architecture), {})
        for known in versions:
            if self._key(known) == self._key(about.version):
                versions[known].append((number, entry))
                return
        versions[about.version] = [(number, entry)]
        if len(versions) > self._count:
            del versions[min(versions, key=self._key)]

    def kept(self) -> Iterator[tuple[int, PackageEntry[Any]]]:
        yield from self._always
        for versions in self._groups.values():
            for entries in versions.values():
                yield from entries


# Debian's order of versions.
#
# Source: deb-version(7). Epoch, upstream version and revision are compared one after the other, each as
# alternating non-digits and digits; ``~`` is before everything, even the end, and letters are before all
# other characters.

_RUN = re.compile(r"([^0-9]*)([0-9]*)")
MAX_VERSION_CHARS = 512


def compare_debian(one: str, other: str) -> int:
    """Return -1, 0 or 1: one version of a Debian package is older than, equal to, or newer than another."""
    if one == other:
        return 0
    found = map(_compare_part, _debian_parts(one), _debian_parts(other))
    return next(filter(None, found), 0)


def _debian_parts(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version[:MAX_VERSION_CHARS].partition(":")
    if not colon:
        epoch, rest = "", version[:MAX_VERSION_CHARS]
    upstream, dash, revision = rest.rpartition("-")
    return epoch, upstream if dash else rest, revision if dash else ""


def _compare_part(mine: str, yours: str) -> int:
    runs = zip_longest(_RUN.findall(mine), _RUN.findall(yours), fillvalue=("", ""))
    for (text, digits), (other, others) in runs:
        key, other_key = [*map(_order, text), 0], [*map(_order, other), 0]
        if key != other_key:
            return 1 if key > other_key else -1
        number, other_number = digits.lstrip("0"), others.lstrip("0")
        if number != other_number:
            return 1 if (len(number), number) > (len(other_number), other_number) else -1
    return 0


def _order(char: str) -> int:
    if char == "~":
        return -1
    return ord(char) if char.isalpha() else ord(char) + 0x110000


# Records of filters.

FilterRecords = dict[str, list[PackageFilter]]
"""The filters of the runs that keep an index, by the index's path without its ending."""


def read_records(destination: Destination) -> FilterRecords:
    """Return the recorded filters; empty if there are none, or if they cannot be read."""
    data = destination.read(f"{HIDDEN}/{FILTERS}", MAX_RECORD_BYTES)
    if data is None:
        return {}
    import json  # few runs need this module

    try:
        found = json.loads(data)
        return {
            path: [_from_fields(each) for each in filters][:MAX_RECORDED]
            for path, filters in found.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _from_fields(fields: Mapping[str, Any]) -> PackageFilter:
    given: dict[str, Any] = {
        name: tuple(map(str, value)) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    made = PackageFilter(**given)
    if not isinstance(made.newest, int) or not 0 <= made.newest <= MAX_NEWEST:
        raise ValueError("newest")
    return made


def others_of(recorded: Sequence[PackageFilter], own: PackageFilter) -> list[PackageFilter]:
    """Return those recorded filters of an index that are not filters of this run."""
    return [each for each in recorded if each.identity != own.identity]


def write_first(destination: Destination, records: FilterRecords) -> None:
    """
    Record the filters of a run, in addition to the recorded ones, before the run publishes indexes.

    If the run is interrupted after that, no other run removes its packages as unselected.

    Raises:
        MirrorError: the filters cannot be written, or are too many for one index.
    """
    merged = read_records(destination)
    for path, filters in records.items():
        if len(filters) > MAX_RECORDED:
            raise MirrorError(
                f"the runs that mirror into {destination.path} use more than {MAX_RECORDED} different "
                "filters in all; discard those of earlier runs with --delete-excluded, or use another "
                "directory"
            )
        known = merged.get(path, [])
        merged[path] = [*filters, *(each for each in known if each not in filters)][:MAX_RECORDED]
    write_records(destination, merged)


def write_records(destination: Destination, records: FilterRecords) -> None:
    """
    Record filters instead of the recorded ones, if they differ.

    Raises:
        MirrorError: the filters cannot be written.
    """
    if not records and destination.read(f"{HIDDEN}/{FILTERS}", 0) is None:
        return
    import json  # few runs need this module

    plain = {path: [_fields(each) for each in filters] for path, filters in records.items()}
    data = json.dumps(plain, sort_keys=True).encode("utf-8")
    if destination.read(f"{HIDDEN}/{FILTERS}", len(data)) == data:
        return
    if len(data) > MAX_RECORD_BYTES:
        raise MirrorError(
            f"the filters of all runs to {destination.path} take more than {MAX_RECORD_BYTES} bytes; use"
            " fewer, or another directory"
        )
    destination.keep_own(FILTERS, data)


def _fields(each: PackageFilter) -> dict[str, Any]:
    return {name: value for name, value in each._asdict().items() if value}


def unmatched_text(option: str, pattern: str) -> str:
    """Return the message for a pattern that matches nothing."""
    what = {"--section": "section of a package", "--priority": "priority of a package"}
    what["--arch"] = "architecture of a package"
    return f"{option} {quoted(pattern)} matches no {what.get(option, 'package')}"

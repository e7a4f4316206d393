"""
Parsers of Debian's release files, ``Packages``, ``Sources`` and lists of patches. Without input or output.

Source: the repository format of Debian's wiki.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from os.path import join
from types import MappingProxyType
from typing import NamedTuple

from pipegrid.mirror.archive_file import (
    DIGEST_BYTES,
    MAX_PATH_BYTES,
    ArchiveFile,
    BadEntry,
    Skip,
    check_path,
    quoted,
    simplified,
    wanted,
    wanted_or_why,
)
from pipegrid.mirror.package_filter import MAX_VERSION_CHARS, Description

# The format of Debian's control files: paragraphs of fields. Source: Debian policy, chapter 5.

MAX_PARAGRAPH_BYTES = 8 << 20
"""Maximum length of a paragraph. In real indexes, a source's files or a package's provides take some KB."""


def paragraphs(
    blocks: Iterable[bytes], fields: frozenset[str], name: str, usual: frozenset[str] = frozenset()
) -> Iterator[dict[str, str]]:
    """
    Yield the requested fields of each paragraph of a control file.

    As in apt: names of fields may be in any case; the last of repeated fields counts; lines may also end in a
    carriage return.

    Args:
        blocks: the bytes of the file, in pieces of any size.
        name: of the file, for errors.
        usual: if a paragraph has these fields, with their names in the same case, it is not searched for
            other spellings; that is faster.

    Yields:
        each paragraph's fields by name; an empty mapping if it has none of them.

    Raises:
        BadEntry: a paragraph is longer than ``MAX_PARAGRAPH_BYTES``.
    """
    for paragraph in raw_paragraphs(blocks, name):
        yield parse_paragraph(paragraph, fields, usual)


def raw_paragraphs(blocks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """
    Yield the bytes of each paragraph of a control file, without the blank lines between paragraphs.

    Raises:
        BadEntry: as for ``paragraphs``.
    """
    rest = b""
    for block in blocks:
        rest += block
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        start = 0
        while (end := rest.find(b"\n\n", start)) >= 0:
            if end > start:
                paragraph = rest[start:end]
                if not paragraph.isspace():
                    yield paragraph
            start = end + 2
        rest = rest[start:]
        if len(rest) > MAX_PARAGRAPH_BYTES:
            raise BadEntry(f"a paragraph of {name} is longer than {MAX_PARAGRAPH_BYTES} bytes")
    if not rest.isspace() and rest:
        yield rest


def parse_paragraph(data: bytes, fields: frozenset[str], usual: frozenset[str]) -> dict[str, str]:
    data = b"\n" + data
    places: dict[str, int] = {}
    for field, mark in _marks(fields):
        start = data.rfind(mark)
        if start >= 0:
            places[field] = start + len(mark)
    if not usual or not usual <= places.keys():
        exact = {field.lower().encode("ascii"): field for field in fields}
        places = {exact[m[1].lower()]: m.end() for m in _any_case(fields).finditer(data)}
    return {field: _value(data, start) for field, start in places.items()}


def _value(data: bytes, start: int) -> str:
    end = data.find(b"\n", start)
    while end >= 0 and data[end + 1 : end + 2] in (b" ", b"\t"):  # some fields have many lines
        end = data.find(b"\n", end + 1)
    value = data[start : end if end >= 0 else len(data)]
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:  # names of maintainers in old encodings; requested fields are ASCII
        text = value.decode("latin-1")
    first, newline, more = text.partition("\n")
    if not newline:
        return first.strip()
    more = more.removeprefix(" ").removeprefix("\t")
    more = more.replace("\n ", "\n").replace("\n\t", "\n")
    return f"{first.strip()}\n{more}"


@lru_cache(maxsize=8)
def _marks(fields: frozenset[str]) -> tuple[tuple[str, bytes], ...]:
    """
    Return pairs of a field's name and the bytes at the beginning of its line, including the line end before.
    """
    return tuple((field, b"\n%s:" % field.encode("ascii")) for field in sorted(fields))


@lru_cache(maxsize=8)
def _any_case(fields: frozenset[str]) -> re.Pattern[bytes]:
    """
    Return a pattern for the beginnings of lines with these fields, in any case, with spaces before the colon.
    """
    names = "|".join(map(re.escape, sorted(fields)))
    return re.compile(rf"\n({names})[ \t]*:".encode("ascii"), re.IGNORECASE)


def lines_of_text(text: str) -> Iterator[str]:
    """Yield the lines of a field that are not blank, without making a list of all lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        if end < 0:
            end = len(text)
        if end > start and (line := text[start:end].strip()):
            yield line
        start = end + 1


MAX_RELEASE_BYTES = MAX_PARAGRAPH_BYTES
"""Maximum size of a release file, which is one paragraph; large archives have some 250 KB."""


MAX_RELEASE_FILES = 200_000
"""
The maximum number of files in one release file; sid's has 4000. Eight megabytes could name a million files,
which would take half a gigabyte of memory.
"""


MAX_ALTERNATIVES = 8
"""Maximum alternatives of one path in a release file that gives several values of one hash for the path."""


_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")


_SIZE = re.compile(r"[0-9]{1,15}")


_USUAL_DATE = re.compile(
    r"[A-Z][a-z]{2}, ([0-9]{1,2}) ([A-Z][a-z]{2}) ([0-9]{4}) ([0-9]{2}:[0-9]{2}:[0-9]{2}) (?:UTC|GMT|\+0000)"
)
"""The date format of nearly all archives; ``_other_date`` reads the rest."""


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


_HASH_FIELDS = {"SHA256": "sha256", "SHA512": "sha512", "MD5Sum": "md5", "SHA1": "sha1"}


Digests = tuple[tuple[str, bytes], ...]
"""Several hashes of one file, each with its algorithm."""


class Release(NamedTuple):
    """
    The content of a release file.

    Attributes:
        components: as listed; if there is no list, the components that have indexes.
        files: the indexes by path relative to the release file, each with its preferred hash.
        by_hash: whether the indexes can also be fetched by their hashes.
        date, valid_until: with their time zones; None if not given.
        all_apart: whether packages for all architectures have their own index ``all`` instead of being listed
            in the index of each architecture.
        digests: all hashes of those files that have more than one.
        others: the alternatives of files for which the release file gives several values of one hash, or
            several sizes.
    """

    components: tuple[str, ...]
    architectures: tuple[str, ...]
    files: Mapping[str, ArchiveFile]
    by_hash: bool
    date: datetime | None
    valid_until: datetime | None
    all_apart: bool = False
    digests: Mapping[str, Digests] = MappingProxyType({})
    others: Mapping[str, tuple[ArchiveFile, ...]] = MappingProxyType({})

    def digests_of(self, path: str) -> Digests:
        """Return all hashes of a file that the release file names."""
        file = self.files[path]
        return self.digests.get(path) or ((file.algorithm, file.digest),)


_RELEASE_FIELDS = frozenset(
    (
        "Components",
        "Architectures",
        "Date",
        "Valid-Until",
        "Acquire-By-Hash",
        "No-Support-for-Architecture-all",
        *_HASH_FIELDS,
    )
)


_YES = frozenset(("yes", "true", "with", "on", "enable", "1"))
"""The values that apt accepts for yes."""


_COMPONENT = re.compile(r"(.+)/(?:binary-[^/]+/Packages|source/Sources)(?:\.[a-z0-9]+)?")


def read_release(
    data: bytes, name: str, skip: Skip | None = None, ignores_dates: bool = False
) -> Release:
    """
    Parse a release file, without its signature.

    Args:
        skip: called with the reason for each unusable line; None: an unusable line is an error.
        ignores_dates: leave out an invalid date.

    Raises:
        BadEntry: the text is not a release file, has only weak hashes, or has an invalid date; or a line is
            unusable, and ``skip`` is None.
    """
    found = next(paragraphs([data], _RELEASE_FIELDS, name), None)
    if found is None or not found.keys() & _HASH_FIELDS.keys():
        raise BadEntry(
            f"{name} is not a release file; perhaps the mirror answers every request with a web page"
        )
    skip = skip or _refuse
    named = _NamedFiles(name, skip)
    for field, algorithm in _HASH_FIELDS.items():
        for line in lines_of_text(found.get(field, "")):
            named.add(line, algorithm)
    files, digests, others = named.result()
    architectures = tuple(_words(found.get("Architectures", "")))
    within = _words(found.get("No-Support-for-Architecture-all", ""))
    return Release(
        components=tuple(_words(found.get("Components", ""))) or _components_of(files),
        architectures=architectures,
        files=files,
        by_hash=found.get("Acquire-By-Hash", "").strip().lower() in _YES,
        date=_date(found.get("Date"), name, ignores_dates),
        valid_until=_date(found.get("Valid-Until"), name, ignores_dates),
        all_apart="all" in architectures and "Packages" not in within,
        digests=digests,
        others=others,
    )


def _refuse(error: BadEntry) -> None:
    raise error


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _components_of(files: Iterable[str]) -> tuple[str, ...]:
    """
    Return the components that have indexes, as apt does for a release file without a list of components.
    """
    found: dict[str, None] = {}
    for path in files:
        match = _COMPONENT.fullmatch(path) if len(path) <= MAX_PATH_BYTES else None
        if match is not None:
            found[match[1]] = None
    return tuple(found)


class _NamedFiles:
    """Collects the files in the lines of a release file, which lists each file once for each algorithm."""

    def __init__(self, name: str, skip: Skip) -> None:
        self._name = name
        self._skip = skip
        self._found: dict[str, tuple[int, dict[str, str]]] = {}
        self._again: list[tuple[str, ArchiveFile | BadEntry]] = []

    def add(self, line: str, algorithm: str) -> None:
        """Add a line from the release file's list of this algorithm's hashes."""
        parts = line.split(None, 3)
        if len(parts) != 3 or _SIZE.fullmatch(parts[1]) is None:
            self._skip(
                BadEntry(f"{self._name} has a line that is not hash, size and path: {quoted(line)}")
            )
            return
        digest, size, path = parts[0], int(parts[1]), parts[2]
        known = self._found.setdefault(path, (size, {}))
        is_other = algorithm in known[1] and known[1][algorithm].lower() != digest.lower()
        if algorithm in DIGEST_BYTES and (is_other or known[0] != size):
            self._again.append((path, wanted_or_why(path, size, {algorithm: digest})))
        elif known[0] != size:
            self._skip(BadEntry(f"{self._name} gives two sizes for {quoted(path)}"))
        else:
            known[1].setdefault(algorithm, digest)
        if len(self._found) + len(self._again) > MAX_RELEASE_FILES:
            raise BadEntry(
                f"{self._name} names more than {MAX_RELEASE_FILES} files; no archive's does"
            )

    def result(
        self,
    ) -> tuple[dict[str, ArchiveFile], dict[str, Digests], dict[str, tuple[ArchiveFile, ...]]]:
        """Return the files by path, all their hashes, and their alternatives."""
        if not any(DIGEST_BYTES.keys() & each.keys() for _, each in self._found.values()):
            raise BadEntry(
                f"{self._name} has only weaker hashes than SHA-256; ask the archive for it"
            )
        files: dict[str, ArchiveFile] = {}
        digests: dict[str, Digests] = {}
        for path, (size, hashes) in self._found.items():
            strong = {each: hashes[each] for each in DIGEST_BYTES if each in hashes}
            # Paths with a leading ``./`` come from scripts that list all files; apt finds no index by them.
            if not strong or path.startswith("./"):
                continue
            file = wanted_or_why(path, size, strong)
            if isinstance(file, BadEntry):
                self._skip(file)
                continue
            files[path] = file
            each = [wanted_or_why(path, size, {name: strong[name]}) for name in strong]
            if len(each) > 1:
                digests[path] = tuple(
                    (one.algorithm, one.digest) for one in each if isinstance(one, ArchiveFile)
                )
        return files, digests, self._others(files)

    def _others(self, files: Mapping[str, ArchiveFile]) -> dict[str, tuple[ArchiveFile, ...]]:
        others: dict[str, tuple[ArchiveFile, ...]] = {}
        for path, other in self._again:
            known = others.get(path, ())
            if isinstance(other, BadEntry):
                self._skip(other)
            elif path in files and len(known) < MAX_ALTERNATIVES:
                others[path] = (*known, other)
        return others


_MONTH_AS_NUMBER = re.compile(
    r"[^0-9]{0,20}([0-9]{1,2}) ?([0-9]{1,2})月 ?([0-9]{4}) ([0-9]{1,2}:[0-9]{2}:[0-9]{2}) ?([^ ]{0,9})"
)


_YEAR_FIRST = re.compile(
    r"([0-9]{4})(?:-|年 ?)([0-9]{1,2})(?:-|月 ?)([0-9]{1,2})(?:日? [^0-9 ]{1,9} |日 ?|[T ])"
    r"([0-9]{1,2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]{1,9})? ?([^ ]{0,9})"
)


_DAY_ALONE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")


_OFFSET = re.compile(r"([+-])([0-9]{2}):?([0-9]{2})")


MAX_DATE_CHARS = 100


def _date(text: str | None, name: str, ignores: bool = False) -> datetime | None:
    if not text:
        return None
    date = None
    if len(text) <= MAX_DATE_CHARS:
        with suppress(ValueError, TypeError, IndexError, OverflowError):
            date = _usual_date(text) or _other_date(text)
    if date is None:
        if ignores:
            return None
        raise BadEntry(
            f"{name} has an invalid date: {quoted(text)} (--ignore-dates mirrors it nevertheless)"
        )
    return date if date.tzinfo is not None else date.replace(tzinfo=timezone.utc)


def _usual_date(text: str) -> datetime | None:
    usual = _USUAL_DATE.fullmatch(text)
    if usual is None or usual[2] not in _MONTHS:
        return None
    month = _MONTHS.index(usual[2]) + 1
    return _moment(usual[3], str(month), usual[1], usual[4], "UTC")


def _other_date(text: str) -> datetime | None:
    """Return a date in the formats of ISO 8601, of Chinese and Japanese locales, or of mails."""
    text = " ".join(text.split())
    match = _YEAR_FIRST.fullmatch(text)
    if match is not None:
        return _moment(*match.group(1, 2, 3, 4, 5))
    match = _MONTH_AS_NUMBER.fullmatch(text)
    if match is not None:
        return _moment(*match.group(3, 2, 1, 4, 5))
    match = _DAY_ALONE.fullmatch(text)
    if match is not None:
        return _moment(match[1], match[2], match[3], "0:0:0", "")
    from email.utils import parsedate_to_datetime

    return parsedate_to_datetime(text)


def _moment(year: str, month: str, day: str, time: str, zone: str) -> datetime | None:
    hour, minute, second = map(int, time.split(":"))
    offset = _OFFSET.fullmatch(zone)
    where = timezone.utc
    if offset is not None:
        ahead = timedelta(hours=int(offset[2]), minutes=int(offset[3]))
        where = timezone(ahead if offset[1] == "+" else -ahead)
    elif zone not in ("", "UTC", "GMT", "Z"):
        return None
    return datetime(int(year), int(month), int(day), hour, minute, second, tzinfo=where)


_PACKAGE_FIELDS = frozenset(("Filename", "Size", "SHA256", "SHA512", "SHA1", "MD5sum"))


_USUAL_PACKAGE = frozenset(("Filename", "Size", "SHA256"))


def packages(blocks: Iterable[bytes], name: str, skip: Skip | None = None) -> Iterator[ArchiveFile]:
    """
    Yield the files that a ``Packages`` file names.

    Args:
        skip: called with the reason for each unusable package; None: an unusable package is an error.

    Raises:
        BadEntry: a package is unusable, and ``skip`` is None; or as for ``paragraphs``.
    """
    skip = skip or _refuse
    for found in paragraphs(blocks, _PACKAGE_FIELDS, name, _USUAL_PACKAGE):
        yield from _package_named(found, name, skip)


def _package_named(found: Mapping[str, str], name: str, skip: Skip) -> Iterable[ArchiveFile]:
    """Return the file of one package; empty if the entry is unusable."""
    try:
        return (_package(found, name),)
    except BadEntry as error:
        skip(error)
        return ()


def _package(found: Mapping[str, str], name: str) -> ArchiveFile:
    path, size = found.get("Filename"), found.get("Size", "")
    if path is None:
        raise BadEntry(f"a package in {name} has no file name")
    if _SIZE.fullmatch(size) is None:
        raise BadEntry(f"{quoted(path)} in {name} has no size")
    hashes = {
        algorithm: found[field]
        for field, algorithm in (
            ("SHA256", "sha256"),
            ("SHA512", "sha512"),
            ("SHA1", "sha1"),
            ("MD5sum", "md5"),
        )
        if field in found
    }
    return wanted(simplified(path), int(size), hashes)


_SOURCE_FIELDS = frozenset(("Directory", "Files", "Checksums-Sha256", "Checksums-Sha512"))


_USUAL_SOURCE = frozenset(("Directory", "Checksums-Sha256"))


def sources(blocks: Iterable[bytes], name: str, skip: Skip | None = None) -> Iterator[ArchiveFile]:
    """
    Yield the files that a ``Sources`` file names.

    Args:
        skip: called with the reason for each unusable file; None: an unusable file is an error.

    Raises:
        BadEntry: a file is unusable, and ``skip`` is None; or as for ``paragraphs``.
    """
    skip = skip or _refuse
    for found in paragraphs(blocks, _SOURCE_FIELDS, name, _USUAL_SOURCE):
        yield from _files_named(found, name, skip)


def _files_named(found: Mapping[str, str], name: str, skip: Skip) -> Iterator[ArchiveFile]:
    """Yield the files of one source."""
    directory = found.get("Directory")
    if directory is None:
        skip(BadEntry(f"a source in {name} has no directory"))
        return
    for file, size, hashes in _files_of_source(found, name, skip):
        each = wanted_or_why(simplified(join(directory, file)), size, hashes)
        if isinstance(each, BadEntry):
            skip(each)
        else:
            yield each


def _files_of_source(
    found: Mapping[str, str], name: str, skip: Skip
) -> list[tuple[str, int, dict[str, str]]]:
    files: dict[str, tuple[int, dict[str, str]]] = {}
    again: list[tuple[str, int, dict[str, str]]] = []
    for field, algorithm in (
        ("Checksums-Sha256", "sha256"),
        ("Checksums-Sha512", "sha512"),
        ("Files", "md5"),
    ):
        for line in lines_of_text(found.get(field, "")):
            parts = line.split(None, 3)
            if len(parts) != 3 or _SIZE.fullmatch(parts[1]) is None:
                skip(BadEntry(f"{name} has a line that is not hash, size and name: {quoted(line)}"))
                continue
            digest, size, file = parts[0], int(parts[1]), parts[2]
            known = files.setdefault(file, (size, {}))
            if known[0] != size:
                skip(BadEntry(f"{name} gives two sizes for {quoted(file)}"))
            elif known[1].setdefault(algorithm, digest).lower() != digest.lower():
                again.append((file, size, {algorithm: digest}))
    return [*((file, size, hashes) for file, (size, hashes) in files.items()), *again]


_DESCRIBING = frozenset(("Package", "Architecture", "Version", "Section", "Priority", "Source"))


_SOURCE = re.compile(r"([^ ]{1,512}) \(([^ ()]{1,512})\)")


class DescribedEntry(NamedTuple):
    """
    A package or source in an index.

    Attributes:
        files: the one file of a package, or all files of a source.
        text: the bytes of the paragraph.
        is_whole: whether the entry has files, and all of them are usable.
    """

    about: Description
    files: tuple[ArchiveFile, ...]
    text: bytes
    is_whole: bool


def described(
    blocks: Iterable[bytes], kind: str, name: str, skip: Skip
) -> Iterator[tuple[Description, DescribedEntry]]:
    """
    Yield pairs of a description and an entry for each entry of an index.

    Args:
        kind: ``packages`` or ``sources``.
        skip: called with the reason for each unusable entry.

    Raises:
        BadEntry: as for ``paragraphs``.
    """
    is_package = kind == "packages"
    fields = _DESCRIBING | (_PACKAGE_FIELDS if is_package else _SOURCE_FIELDS)
    files_in = _package_named if is_package else _files_named
    for text in raw_paragraphs(blocks, name):
        found = parse_paragraph(text, fields, frozenset())
        about = _description(found, kind)
        wrong: list[BadEntry] = []
        files = tuple(files_in(found, name, wrong.append))
        for why in wrong:
            skip(why)
        if files or not is_package:
            yield about, DescribedEntry(about, files, text, bool(files) and not wrong)


def _description(found: Mapping[str, str], kind: str) -> Description:
    package, version = found.get("Package", ""), found.get("Version", "")[:MAX_VERSION_CHARS]
    source = (package, version)
    told = found.get("Source", "")
    if told and kind == "packages":
        match = _SOURCE.fullmatch(told) if len(told) <= MAX_PATH_BYTES else None
        source = (match[1], match[2]) if match is not None else (told, version)
    return Description(
        package,
        found.get("Architecture", "") if kind == "packages" else "source",
        version,
        found.get("Section", ""),
        found.get("Priority", ""),
        source,
    )


class PatchStep(NamedTuple):
    """
    One patch of an index.

    Attributes:
        before: SHA-256 of the version that the patch applies to.
        packed: the compressed patch, which is fetched; None if its hash is unknown.
    """

    before: bytes
    packed: ArchiveFile | None


class PatchIndex(NamedTuple):
    """
    The content of an ``Index`` file, which lists the patches of one index.

    Attributes:
        current: SHA-256 of the newest version of the index.
        steps: the patches, oldest first.
        merged: whether each patch leads to the newest version, instead of to the version that the next patch
            applies to.
    """

    current: bytes
    steps: tuple[PatchStep, ...]
    merged: bool = False

    def chain(self, have: bytes) -> tuple[PatchStep, ...] | None:
        """
        Return the patches that lead from a version to the newest, oldest first; None for an unknown version.
        """
        if have == self.current:
            return ()
        for number in reversed(range(len(self.steps))):
            if self.steps[number].before == have:
                return self.steps[number : number + 1] if self.merged else self.steps[number:]
        return None


_PATCH_FIELDS = frozenset(
    ("SHA256-Current", "SHA256-History", "SHA256-Download", "X-Patch-Precedence")
)


def read_patch_index(data: bytes, directory: str, name: str) -> PatchIndex:
    """
    Parse the ``Index`` file that lists patches.

    Args:
        directory: the directory of the file and of the patches.

    Raises:
        BadEntry: the text is not such a file.
    """
    found = next(paragraphs([data], _PATCH_FIELDS, name), None)
    if found is None or "SHA256-Current" not in found or "SHA256-History" not in found:
        raise BadEntry(f"{name} is not an index of patches with SHA-256")
    current = _digest_of(found["SHA256-Current"].split(), name)
    downloads = {
        row[2].rpartition(".")[0]: row for row in _rows(found.get("SHA256-Download", ""), name)
    }
    steps = []
    for row in _rows(found["SHA256-History"], name):
        digest = _digest_of(row, name)
        check_path(f"{directory}/{row[2]}")
        download = downloads.get(row[2])
        packed = None
        if download is not None:
            packed = wanted(f"{directory}/{download[2]}", int(download[1]), {"sha256": download[0]})
        steps.append(PatchStep(digest, packed))
    merged = found.get("X-Patch-Precedence", "").lower() == "merged"
    return PatchIndex(current, tuple(steps), merged)


def _rows(text: str, name: str) -> list[list[str]]:
    rows = [line.split(None, 3) for line in lines_of_text(text)]
    if any(len(row) != 3 or _SIZE.fullmatch(row[1]) is None for row in rows):
        raise BadEntry(f"{name} has a line that is not hash, size and name")
    return rows


def _digest_of(row: list[str], name: str) -> bytes:
    """Return the hash in a line with a hash and a size."""
    if len(row) < 2 or _SHA256.fullmatch(row[0]) is None or _SIZE.fullmatch(row[1]) is None:
        raise BadEntry(f"{name} has a line that is not hash and size")
    return bytes.fromhex(row[0])

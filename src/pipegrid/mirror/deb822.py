"""
Debian's control files, as far as a mirror reads them: paragraphs, release files, and what indexes name. Pure.

Sources: Debian policy, chapter 5; the repository format of Debian's wiki.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import lru_cache
from os.path import join
from typing import NamedTuple

from pipegrid.mirror.wanted import DIGEST_BYTES, BadEntry, Wanted, check_path, quoted, wanted

MAX_PARAGRAPH_BYTES = 8 << 20
"""The longest of an index: a package's files in Sources, or its provides, take some kilobytes."""

MAX_RELEASE_BYTES = MAX_PARAGRAPH_BYTES
"""A release file is one paragraph; those of large archives have a quarter of a megabyte."""

MAX_RELEASE_FILES = 200_000
"""That one names; sid's names 4000. In eight megabytes a million have room, and take half a gigabyte."""

_SHA256 = re.compile(r"[0-9A-Fa-f]{64}")
_SIZE = re.compile(r"[0-9]{1,15}")

_USUAL_DATE = re.compile(
    r"[A-Z][a-z]{2}, ([0-9]{1,2}) ([A-Z][a-z]{2}) ([0-9]{4}) ([0-9]{2}:[0-9]{2}:[0-9]{2}) (?:UTC|GMT|\+0000)"
)
"""As archives write it, who need no more; others write dates as in mails."""

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_HASH_FIELDS = {"SHA256": "sha256", "SHA512": "sha512", "MD5Sum": "md5", "SHA1": "sha1"}


def paragraphs(
    blocks: Iterable[bytes], fields: frozenset[str], name: str
) -> Iterator[dict[str, str]]:
    """
    Yield the paragraphs of a control file, with the fields that are asked for.

    Args:
        blocks: its bytes, in pieces of any size.
        name: of the file, for errors.

    Yields:
        each paragraph's fields by name; one that has none of them is empty.

    Raises:
        BadEntry: a paragraph is longer than ``MAX_PARAGRAPH_BYTES``, or has a field twice.
    """
    rest = b""
    for block in blocks:
        rest += block
        *whole, rest = rest.split(b"\n\n")
        for paragraph in whole:
            if not paragraph.isspace() and paragraph:
                yield _paragraph(paragraph, fields, name)
        if len(rest) > MAX_PARAGRAPH_BYTES:
            raise BadEntry(f"a paragraph of {name} is longer than {MAX_PARAGRAPH_BYTES} bytes")
    if not rest.isspace() and rest:
        yield _paragraph(rest, fields, name)


def _paragraph(data: bytes, fields: frozenset[str], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    data = b"\n" + data
    for field, mark in _marks(fields):  # some of many lines
        start = data.find(mark)
        if start < 0:
            continue
        if data.find(mark, start + 1) >= 0:
            raise BadEntry(f"a paragraph of {name} has two fields {field}")
        end = data.find(b"\n", start + 1)
        while end >= 0 and data[end + 1 : end + 2] in (b" ", b"\t"):
            end = data.find(b"\n", end + 1)
        value = data[start + len(mark) : end if end >= 0 else len(data)]
        try:
            first, *more = value.decode("utf-8").split("\n")
        except UnicodeDecodeError:  # old maintainers' names; what is asked for is ASCII
            first, *more = value.decode("latin-1").split("\n")
        found[field] = "\n".join((first.strip(), *(line[1:] for line in more)))
    return found


@lru_cache(maxsize=8)
def _marks(fields: frozenset[str]) -> tuple[tuple[str, bytes], ...]:
    """Return how lines with these fields begin, and the ends of the lines before them."""
    return tuple((field, b"\n%s:" % field.encode("ascii")) for field in sorted(fields))


class Release(NamedTuple):
    """
    A release file.

    Attributes:
        files: the indexes that it names, by path below it; the best hash of each.
        by_hash: whether they are also there under their hashes.
        date, valid_until: with their time zones.
        all_apart: packages for all architectures are not in the indexes of each, but in one of ``all``.
    """

    suite: str
    codename: str
    components: tuple[str, ...]
    architectures: tuple[str, ...]
    files: Mapping[str, Wanted]
    by_hash: bool
    date: datetime | None
    valid_until: datetime | None
    all_apart: bool = False


_RELEASE_FIELDS = frozenset(
    (
        "Suite",
        "Codename",
        "Components",
        "Architectures",
        "Date",
        "Valid-Until",
        "Acquire-By-Hash",
        "No-Support-for-Architecture-all",
        *_HASH_FIELDS,
    )
)


def read_release(data: bytes, name: str) -> Release:
    """
    Read a release file, without its signature.

    Raises:
        BadEntry: it is none, names files that may not be, or proves them by weaker hashes only.
    """
    found = next(paragraphs([data], _RELEASE_FIELDS, name), None)
    if found is None or not found.keys() & _HASH_FIELDS.keys():
        raise BadEntry(
            f"{name} is no release file; perhaps the mirror serves a page for everything"
        )
    hashes: dict[str, tuple[int, dict[str, bytes | str]]] = {}
    for field, algorithm in _HASH_FIELDS.items():
        for line in found.get(field, "").split("\n"):
            if not line.strip():
                continue
            parts = line.split()
            if len(parts) != 3 or _SIZE.fullmatch(parts[1]) is None:
                raise BadEntry(f"{name} has a line that is not hash, size and path: {quoted(line)}")
            size, path = int(parts[1]), parts[2]
            known = hashes.setdefault(path, (size, {}))
            if known[0] != size:
                raise BadEntry(f"{name} gives two sizes for {quoted(path)}")
            known[1][algorithm] = parts[0]
            if len(hashes) > MAX_RELEASE_FILES:
                raise BadEntry(
                    f"{name} names more than {MAX_RELEASE_FILES} files; no archive's does"
                )
    if not any(DIGEST_BYTES.keys() & each.keys() for _, each in hashes.values()):
        raise BadEntry(f"{name} has only weaker hashes than SHA-256; ask the archive for it")
    files = {
        path: wanted(path, size, each)
        for path, (size, each) in hashes.items()
        # What begins with a dot is of scripts that list all there is; apt finds no index by it.
        if DIGEST_BYTES.keys() & each.keys() and not path.startswith("./")
    }
    architectures = tuple(found.get("Architectures", "").split())
    within = found.get("No-Support-for-Architecture-all", "").split()
    return Release(
        suite=found.get("Suite", ""),
        codename=found.get("Codename", ""),
        components=tuple(found.get("Components", "").split()),
        architectures=architectures,
        files=files,
        by_hash=found.get("Acquire-By-Hash", "").lower() == "yes",
        date=_date(found.get("Date"), name),
        valid_until=_date(found.get("Valid-Until"), name),
        all_apart="all" in architectures and "Packages" not in within,
    )


def _date(text: str | None, name: str) -> datetime | None:
    if not text:
        return None
    usual = _USUAL_DATE.fullmatch(text)
    try:
        if usual is not None and usual[2] in _MONTHS:
            day, year = int(usual[1]), int(usual[3])
            hour, minute, second = map(int, usual[4].split(":"))
            month = _MONTHS.index(usual[2]) + 1
            date = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc)
        else:
            from email.utils import parsedate_to_datetime

            date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        date = None
    if date is None:
        raise BadEntry(f"{name} has a date that is none: {quoted(text)}")
    return date if date.tzinfo is not None else date.replace(tzinfo=timezone.utc)


_PACKAGE_FIELDS = frozenset(("Filename", "Size", "SHA256", "SHA512", "SHA1", "MD5sum"))


def packages(blocks: Iterable[bytes], name: str) -> Iterator[Wanted]:
    """
    Yield the packages that a ``Packages`` file names.

    Raises:
        BadEntry: one has a path, size or hash that is refused.
    """
    for found in paragraphs(blocks, _PACKAGE_FIELDS, name):
        path, size = found.get("Filename"), found.get("Size", "")
        if path is None:
            raise BadEntry(f"a package in {name} has no file name")
        if _SIZE.fullmatch(size) is None:
            raise BadEntry(f"{quoted(path)} in {name} has no size")
        path = path.removeprefix("./")
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
        yield wanted(path, int(size), hashes)


_SOURCE_FIELDS = frozenset(("Directory", "Files", "Checksums-Sha256", "Checksums-Sha512"))
_SOURCE_LINE = re.compile(r"([0-9A-Fa-f]+)[ \t]+([0-9]{1,15})[ \t]+(\S+)")


def sources(blocks: Iterable[bytes], name: str) -> Iterator[Wanted]:
    """
    Yield the files that a ``Sources`` file names.

    Raises:
        BadEntry: one has a path, size or hash that is refused.
    """
    for found in paragraphs(blocks, _SOURCE_FIELDS, name):
        directory = found.get("Directory")
        if directory is None:
            raise BadEntry(f"a source in {name} has no directory")
        directory = "" if directory == "." else directory.removeprefix("./")
        files: dict[str, tuple[int, dict[str, bytes | str]]] = {}
        for field, algorithm in (
            ("Checksums-Sha256", "sha256"),
            ("Checksums-Sha512", "sha512"),
            ("Files", "md5"),
        ):
            for line in found.get(field, "").split("\n"):
                if not line.strip():
                    continue
                match = _SOURCE_LINE.fullmatch(line.strip())
                if match is None:
                    raise BadEntry(
                        f"{name} has a line that is not hash, size and name: {quoted(line)}"
                    )
                size = int(match[2])
                known = files.setdefault(match[3], (size, {}))
                if known[0] != size:
                    raise BadEntry(f"{name} gives two sizes for {quoted(match[3])}")
                known[1][algorithm] = match[1]
        for file, (size, hashes) in files.items():
            path = join(directory, file)
            yield wanted(path, size, hashes)


class PatchStep(NamedTuple):
    """
    One patch of an index.

    Attributes:
        before: SHA-256 and size of what it is for.
        packed: what is fetched: size and SHA-256, packed.
    """

    name: str
    before: bytes
    before_size: int
    packed: Wanted | None


class PatchIndex(NamedTuple):
    """
    The ``Index`` of patches of one index.

    Attributes:
        current, current_size: SHA-256 and size of the newest version.
        steps: oldest first.
        merged: each step leads to the newest version, rather than to the one of the next step.
    """

    current: bytes
    current_size: int
    steps: tuple[PatchStep, ...]
    merged: bool = False

    def chain(self, have: bytes) -> tuple[PatchStep, ...] | None:
        """Return the patches from a version on, oldest first; None if it is none that they know."""
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
    Read the ``Index`` file of patches.

    Args:
        directory: where it stands, and the patches beside it.

    Raises:
        BadEntry: it is none.
    """
    found = next(paragraphs([data], _PATCH_FIELDS, name), None)
    if found is None or "SHA256-Current" not in found or "SHA256-History" not in found:
        raise BadEntry(f"{name} is no index of patches with SHA-256")
    current, current_size = _hash_and_size(found["SHA256-Current"].split(), name)
    history = _rows(found["SHA256-History"], name)
    downloads = {
        row[2].rpartition(".")[0]: row for row in _rows(found.get("SHA256-Download", ""), name)
    }
    steps = []
    for row in history:
        digest, size = _hash_and_size(row, name)
        check_path(f"{directory}/{row[2]}")
        download = downloads.get(row[2])
        packed = None
        if download is not None:
            packed = wanted(f"{directory}/{download[2]}", int(download[1]), {"sha256": download[0]})
        steps.append(PatchStep(row[2], digest, size, packed))
    merged = found.get("X-Patch-Precedence", "").lower() == "merged"
    return PatchIndex(current, current_size, tuple(steps), merged)


def _rows(text: str, name: str) -> list[list[str]]:
    rows = [line.split() for line in text.split("\n") if line.strip()]
    if any(len(row) != 3 or _SIZE.fullmatch(row[1]) is None for row in rows):
        raise BadEntry(f"{name} has a line that is not hash, size and name")
    return rows


def _hash_and_size(row: list[str], name: str) -> tuple[bytes, int]:
    if len(row) < 2 or _SHA256.fullmatch(row[0]) is None or _SIZE.fullmatch(row[1]) is None:
        raise BadEntry(f"{name} has a line that is not hash and size")
    return bytes.fromhex(row[0]), int(row[1])

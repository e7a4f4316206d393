"""Metadata of RPM repositories: ``repomd.xml``, the primary index, and the order of RPM versions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol
from xml.parsers import expat

from pipegrid.mirror.archive_file import (
    ArchiveFile,
    BadEntry,
    Skip,
    casefold_path,
    quoted,
    simplified,
    wanted,
)

# Untrusted XML, parsed in pieces: elements, attributes and texts, all of which have limits. Without input or
# output.
#
# The parser refuses: document types, and with them all entities except the five of XML itself; encodings
# other than UTF-8; elements nested deeper than ``MAX_DEPTH``; a tag, comment or other piece of markup of more
# than ``MAX_MARKUP_BYTES``; a text of more than ``MAX_TEXT_CHARS``; more than ``MAX_NAMES`` different names,
# since each name is kept while the document is parsed.

MAX_DEPTH = 32
MAX_MARKUP_BYTES = 1 << 20
MAX_TEXT_CHARS = 64 << 10
MAX_NAMES = 4096
FED_BYTES = 64 << 10
"""How many bytes are parsed in one step; after a refused place, at most this many more are parsed."""


class ElementReader(Protocol):
    """Gets the elements of a document from the parser."""

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        """
        Handle the beginning of an element.

        Args:
            depth: 1 for the outermost element.
            name: as written, with its prefix.

        Returns:
            whether the element's text is wanted.
        """

    def closed(self, depth: int, name: str, text: str) -> None:
        """
        Handle the end of an element.

        Args:
            text: the element's text, without that of inner elements; "" if it was not wanted.
        """


class XmlParser:
    """
    The parser of one document.

    Args:
        reader: gets the elements; an exception that it raises ends the parsing.
        name: of the document, for errors.
    """

    def __init__(self, reader: ElementReader, name: str) -> None:
        self._name = name
        self._names: dict[str, str] = {}
        self._reader = reader
        self._depth = 0
        self._text: list[str] = []
        self._text_chars = 0
        self._text_depth = 0
        self._fed_bytes = 0
        # This overrides the encoding that a document declares.
        self._expat = parser = expat.ParserCreate("utf-8", intern=self._names)
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        parser.StartElementHandler = self._open
        parser.EndElementHandler = self._close

    def feed(self, data: bytes) -> None:
        """
        Parse the next part of the document.

        Raises:
            BadEntry: the document is not XML, or is refused.
        """
        # Expat would accept UTF-16 with such a byte order mark.
        if not self._fed_bytes and data[:1] in (
            b"\xfe",
            b"\xff",
        ):
            raise BadEntry(f"{self._name} is not UTF-8")
        view = memoryview(data)
        for start in range(0, len(view), FED_BYTES):
            self._feed(bytes(view[start : start + FED_BYTES]))

    def _feed(self, data: bytes) -> None:
        self._parse(data, False)
        self._fed_bytes += len(data)
        if self._fed_bytes - self._expat.CurrentByteIndex > MAX_MARKUP_BYTES:
            raise self._refusal(f"a tag or comment of more than {MAX_MARKUP_BYTES} bytes")
        if len(self._names) > MAX_NAMES:
            raise self._refusal(f"more than {MAX_NAMES} different names of elements and attributes")

    def end(self) -> None:
        """
        Check that the document is complete.

        Raises:
            BadEntry: the document is incomplete.
        """
        self._parse(b"", True)

    @property
    def offset(self) -> int:
        """The position in bytes of the current tag, which opens or closes an element."""
        return self._expat.CurrentByteIndex

    def _parse(self, data: bytes, last: bool) -> None:
        try:
            self._expat.Parse(data, last)
        except expat.ExpatError as error:
            raise BadEntry(
                f"{self._name} is not XML ({error}); perhaps the mirror answers every request with a web page"
            ) from None
        except UnicodeError:
            raise BadEntry(f"{self._name} is not UTF-8") from None

    def _refusal(self, what: str) -> BadEntry:
        return BadEntry(f"{self._name} has {what}; it is not read on")

    def _refuse_doctype(self, name: str, *_: object) -> None:
        raise self._refusal(f"a document type ({quoted(name)}), which no index needs")

    def _open(self, name: str, attributes: Mapping[str, str]) -> None:
        self._depth = depth = self._depth + 1
        if depth > MAX_DEPTH:
            raise self._refusal(f"elements that are nested more than {MAX_DEPTH} deep")
        if self._reader.opened(depth, name, attributes):
            self._text, self._text_chars, self._text_depth = [], 0, depth
            self._expat.CharacterDataHandler = self._add_text

    def _add_text(self, text: str) -> None:
        if self._depth != self._text_depth:
            return
        self._text_chars += len(text)
        if self._text_chars > MAX_TEXT_CHARS:
            raise self._refusal(f"a text of more than {MAX_TEXT_CHARS} characters")
        self._text.append(text)

    def _close(self, name: str) -> None:
        depth = self._depth
        text = ""
        if depth == self._text_depth:
            text = "".join(self._text)
            self._text_depth = 0
            self._expat.CharacterDataHandler = None
        self._depth = depth - 1
        self._reader.closed(depth, name, text)


MAX_ELEMENT_BYTES = 64 << 20
"""Maximum size of the element of one package; the largest known, with all its files, has a tenth of that."""


class RawElements:
    """
    The bytes of a document that are still needed while it is being parsed.

    Attributes:
        parser: of the document; must be set before anything is parsed.
        base: the position in the document of the first kept byte.
        keep_from: the position of the wanted element, from which on bytes are kept; None if no element is
            wanted.
    """

    def __init__(self, name: str) -> None:
        self.parser: XmlParser | None = None
        self.base = 0
        self.keep_from: int | None = None
        self._name = name
        self._data = bytearray()

    def add(self, block: bytes) -> None:
        """
        Add a block of the document, before the parser gets the block.

        Raises:
            BadEntry: an element is longer than ``MAX_ELEMENT_BYTES``.
        """
        self._data += block
        if len(self._data) > MAX_ELEMENT_BYTES:
            raise BadEntry(f"{self._name} has an element of more than {MAX_ELEMENT_BYTES} bytes")

    def tag(self) -> tuple[int, int]:
        """Return the positions of the beginning and the end of the current tag."""
        assert self.parser is not None
        begin = at = self.parser.offset
        data, base = self._data, self.base
        while (end := data.find(b">", at - base)) >= 0:
            quotes = {data.find(mark, at - base, end): mark for mark in (b'"', b"'")}
            first = min((place for place in quotes if place >= 0), default=-1)
            if first < 0:
                return begin, end + 1 + base
            closing = data.find(quotes[first], first + 1)
            if closing < 0:
                break
            at = closing + 1 + base
        return begin, base + len(data)  # the parser would not have accepted such a tag

    def cut(self, begin: int, end: int) -> bytes:
        """Return the bytes between two positions of the document."""
        return bytes(self._data[begin - self.base : end - self.base])

    def forget(self) -> None:
        """Drop bytes that are not wanted: those before the wanted element, or before the current position."""
        assert self.parser is not None
        until = self.parser.offset if self.keep_from is None else self.keep_from
        del self._data[: max(0, until - self.base)]
        self.base = max(self.base, until)


# Which of two versions of a package is newer, as rpm compares them. Without input or output.
#
# Source: rpm's manual, "rpm-version(7)". Epoch, version and release are compared one after the other, each by
# its runs of digits and of letters; ``~`` is before everything, even the end; ``^`` is after the end, but
# before everything else.

_TOKEN = re.compile(r"[0-9]+|[A-Za-z]+|~|\^")

MAX_VERSION_CHARS = 256
"""The maximum length of each of the three parts of a version; real ones have a tenth of that."""


class RpmVersion(NamedTuple):
    """
    The version of a package.

    Attributes:
        epoch: "" counts as "0".
    """

    epoch: str
    version: str
    release: str


def compare(one: str, other: str) -> int:
    """Return -1, 0 or 1: one part of a version is older than, equal to, or newer than another."""
    if one == other:
        return 0
    ours, theirs = _TOKEN.findall(one), _TOKEN.findall(other)
    found = next(filter(None, map(_compare_tokens, ours, theirs)), 0)
    if found or len(ours) == len(theirs):
        return found
    shared = min(len(ours), len(theirs))
    longer, sign = (ours, 1) if len(ours) > shared else (theirs, -1)
    return -sign if longer[shared] == "~" else sign


def _compare_tokens(mine: str, yours: str) -> int:
    if mine == yours:
        return 0
    for mark in "~^":  # ``^`` is older than any other continuation
        if mark in (mine, yours):
            return -1 if mine == mark else 1
    if mine.isdigit() != yours.isdigit():
        return 1 if mine.isdigit() else -1
    if mine.isdigit():
        mine, yours = mine.lstrip("0"), yours.lstrip("0")
        if len(mine) != len(yours):
            return 1 if len(mine) > len(yours) else -1
    return (mine > yours) - (mine < yours)


def compare_versions(one: RpmVersion, other: RpmVersion) -> int:
    """Return -1, 0 or 1: one version is older than, equal to, or newer than another."""
    return (
        compare(one.epoch or "0", other.epoch or "0")
        or compare(one.version, other.version)
        or compare(one.release, other.release)
    )


# Indexes of an RPM repository: ``repomd.xml``, which names all other indexes; ``primary``, which names
# packages. Without input or output.
#
# Sources: createrepo's documentation; librepo and zypp, which read both.

REPOMD = "repodata/repomd.xml"
SIGNATURE = REPOMD + ".asc"

MAX_REPOMD_BYTES = 8 << 20
MAX_METADATA_FILES = 1000
"""How many files one ``repomd.xml`` may name; large repositories have some thirty."""

_SIZE = re.compile(r"[0-9]{1,15}")

SOURCE_ARCHITECTURES = ("src", "nosrc")
_SOURCE = "sourcerpm"

_HASHES = {"sha": "sha1"}
"""Types of checksums whose names differ from those in ``hashlib``."""


class Metadata(NamedTuple):
    """
    A file that ``repomd.xml`` names.

    Attributes:
        kind: such as ``primary``, ``filelists``, ``primary_db``.
        opened: the decompressed file; None if its size or hash is unknown.
        timestamp: in seconds since 1970; 0 if unknown.
        raw: the bytes of the element that names the file.
    """

    kind: str
    file: ArchiveFile
    opened: ArchiveFile | None
    timestamp: int = 0
    raw: bytes = b""


class Repomd(NamedTuple):
    """
    The content of a ``repomd.xml``.

    Attributes:
        revision: as written; mostly seconds since 1970.
        timestamp: the newest timestamp of any file; 0 if no file has one.
        files: in the order of the document.
        head: the bytes of all other elements, such as the revision and tags.
    """

    revision: str
    timestamp: int
    files: tuple[Metadata, ...]
    head: tuple[bytes, ...] = ()

    @property
    def primary(self) -> Metadata:
        """The only file of kind ``primary``, which names the packages; every ``Repomd`` has one."""
        return next(each for each in self.files if each.kind == "primary")


class Package(NamedTuple):
    """
    A package that ``primary`` names.

    Attributes:
        arch: such as ``x86_64``, ``noarch`` or ``src``.
        number: the position of the package in its ``primary``.
        identity: the package's hash as text, with which other indexes identify the package.
        source: the file name of its source package, or of the package itself if that is a source package; ""
            if unknown.
    """

    name: str
    arch: str
    version: RpmVersion
    file: ArchiveFile
    number: int = 0
    identity: str = ""
    source: str = ""


def read_repomd(data: bytes, name: str, skip: Skip | None = None) -> Repomd:
    """
    Parse ``repomd.xml``.

    Args:
        name: of the file, for errors.
        skip: called with the reason for each unusable file; None: an unusable file is an error.

    Raises:
        BadEntry: the data is not a ``repomd.xml``, or names no usable ``primary``; or a file is unusable, and
            ``skip`` is None.
    """
    reader = _RepomdReader(name, skip or _refuse)
    parser = reader.raw.parser = XmlParser(reader, name)
    reader.raw.add(data)
    parser.feed(data)
    parser.end()
    if not any(each.kind == "primary" for each in reader.found):
        why = f" ({reader.reasons[0]})" if reader.reasons else ""
        raise BadEntry(f"{name} names no primary, which lists the packages{why}")
    return Repomd(reader.revision, reader.timestamp, tuple(reader.found), tuple(reader.head))


def packages(
    blocks: Iterable[bytes], name: str, urls: Sequence[str] = (), skip: Skip | None = None
) -> Iterator[Package]:
    """
    Yield the packages in a ``primary``, while it is being read.

    Args:
        blocks: the decompressed bytes, in pieces of any size.
        urls: of the mirrors. If the ``xml:base`` of a package is below one of these URLs, the package is in
            the repository; other bases are refused.
        skip: called with the reason for each unusable package; None: an unusable package is an error.

    Raises:
        BadEntry: the document is not a ``primary``; or a package is unusable, and ``skip`` is None.
    """
    reader = _PrimaryReader(name, urls, skip or _refuse)
    parser = XmlParser(reader, name)
    for block in blocks:
        parser.feed(block)
        if reader.found:
            found, reader.found = reader.found, []
            yield from found
    parser.end()
    yield from reader.found


def _refuse(error: BadEntry) -> None:
    raise error


class _Entry:
    """
    The content of one element ``data`` or ``package``: the texts and the attributes of its inner elements, by
    name.
    """

    def __init__(self, document: str, urls: Sequence[str] = ()) -> None:
        self.document = document
        self._urls = urls
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, Mapping[str, str]] = {}
        self._twice = ""

    def open(self, name: str, attributes: Mapping[str, str]) -> None:
        """
        Add an inner element. A second one of the same name is an error, since other programs might use the
        other one.
        """
        if name in self.attributes:
            self._twice = name
        self.attributes[name] = attributes

    def path(self) -> str:
        """Return the path of the file relative to the repository."""
        location = self.attributes.get("location", {})
        path = location.get("href")
        if path is None:
            raise BadEntry(f"{self.document} has an entry without a location")
        base = location.get("xml:base", "")
        above = _within(base, self._urls)
        if above is None:
            raise BadEntry(
                f"{self.document} has {quoted(path)} on another site (xml:base {quoted(base)}), which is "
                "not among the mirrors given"
            )
        return above + simplified(path)

    def size(self, text: str | None) -> int | None:
        """Return the size in a text; None if there is no text, and then only the hash proves the file."""
        if text is None:
            return None
        if _SIZE.fullmatch(text.strip()) is None:
            raise BadEntry(f"{self.document} does not give the size of {quoted(self.path())}")
        return int(text)

    def file(self, size: int | None, checksum: str = "checksum") -> ArchiveFile:
        """Return the file that the entry names. Raises BadEntry."""
        if self._twice:
            raise BadEntry(f"{self.document} has an entry with more than one <{self._twice}>")
        kind = self.attributes.get(checksum, {}).get("type", "").lower()
        if not kind:
            raise BadEntry(f"{self.document} does not give the hash of {quoted(self.path())}")
        value = self.texts.get(checksum, "").strip()
        return wanted(self.path(), size, {_HASHES.get(kind, kind): value})


def _within(base: str, urls: Sequence[str]) -> str | None:
    """
    Return an ``xml:base`` relative to the repository, "" or ending in a slash; None if it leads to another
    place.
    """
    base = base.strip()
    if base and not base.endswith("/"):
        base += "/"
    if ":" not in base and base[:1] != "/":  # relative, as in repositories that can be moved
        return base.removeprefix("./")
    for url in urls:
        url = url.rstrip("/") + "/"
        if base.startswith(url):
            return base[len(url) :]
    return None


class _RepomdReader:
    """Reads a ``repomd.xml`` from ``XmlParser``; ``found`` has its files."""

    _TEXTS = frozenset(("checksum", "open-checksum", "size", "open-size", "timestamp"))

    def __init__(self, name: str, skip: Skip) -> None:
        self.raw = RawElements(name)
        self.head: list[bytes] = []
        self._begin = 0
        self.found: list[Metadata] = []
        self.reasons: list[BadEntry] = []
        self._skip = skip
        self.revision = ""
        self.timestamp = 0
        self._name = name
        self._entry: _Entry | None = None
        self._kind = ""
        self._places = {REPOMD, SIGNATURE}

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        if depth == 1 and name != "repomd":
            raise BadEntry(
                f"{self._name} is not a repomd.xml; perhaps the mirror answers every request with a web page"
            )
        if depth == 2:
            self._begin, _ = self.raw.tag()
        if depth == 2 and name == "data":
            if len(self.found) >= MAX_METADATA_FILES:
                raise BadEntry(f"{self._name} names more than {MAX_METADATA_FILES} files")
            self._entry = _Entry(self._name)
            self._kind = attributes.get("type", "")
        elif depth == 3 and self._entry is not None:
            if name == "location" or name in self._TEXTS:
                self._entry.open(name, attributes)
            return name in self._TEXTS
        return depth == 2 and name == "revision"

    def closed(self, depth: int, name: str, text: str) -> None:
        entry = self._entry
        if depth == 2 and name == "revision":
            self.revision = text.strip()
        raw = self.raw.cut(self._begin, self.raw.tag()[1]) if depth == 2 else b""
        if depth == 2 and entry is None and len(self.head) < MAX_METADATA_FILES:
            self.head.append(raw)
        if entry is None:
            return
        if depth == 3 and name in self._TEXTS:
            entry.texts[name] = text.strip()
        elif depth == 2:
            self._entry = None
            try:
                self._add(entry, raw)
            except BadEntry as error:
                self.reasons[1:] = [error]
                self._skip(error)

    def _add(self, entry: _Entry, raw: bytes) -> None:
        file = entry.file(entry.size(entry.texts.get("size")))
        place = casefold_path(file.path)
        if place in self._places:
            if any(file == each.file and each.kind != self._kind for each in self.found):
                return  # the same file may have several kinds
            raise BadEntry(f"{self._name} names {quoted(file.path)}, which has another meaning")
        if self._kind == "primary" and any(each.kind == "primary" for each in self.found):
            raise BadEntry(f"{self._name} names two files primary")
        self._places.add(place)
        opened = None
        if entry.texts.get("open-checksum") and entry.texts.get("open-size"):
            with suppress(BadEntry):  # if unusable, it is left out, since it is not needed
                opened = entry.file(entry.size(entry.texts["open-size"]), "open-checksum")
        told = entry.texts.get("timestamp", "").partition(".")[0]
        timestamp = int(told) if _SIZE.fullmatch(told) else 0
        self.timestamp = max(self.timestamp, timestamp)
        self.found.append(Metadata(self._kind, file, opened, timestamp, raw))


class _PrimaryReader:
    """Reads a ``primary`` from ``XmlParser``; ``found`` has the packages, until the caller removes them."""

    _TEXTS = frozenset(("name", "arch", "checksum"))
    _OTHERS = frozenset(("version", "size", "location"))

    def __init__(self, name: str, urls: Sequence[str], skip: Skip) -> None:
        self.found: list[Package] = []
        self._skip = skip
        self._name = name
        self._urls = urls
        self._entry: _Entry | None = None
        self._number = -1

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        if depth > 3:
            return depth == 4 and name.endswith(_SOURCE)
        if depth == 3:
            if self._entry is None:
                return False
            if name in self._TEXTS:
                self._entry.open(name, attributes)
                return True
            if name in self._OTHERS:
                self._entry.open(name, attributes)
        elif depth == 2:
            if name == "package" and attributes.get("type", "rpm") == "rpm":
                self._entry = _Entry(self._name, self._urls)
                self._number += 1
        elif name != "metadata":
            raise BadEntry(
                f"{self._name} is not a primary; it has {quoted(name)} in place of metadata"
            )
        return False

    def closed(self, depth: int, name: str, text: str) -> None:
        if depth > 3 or self._entry is None:
            if depth == 4 and name.endswith(_SOURCE) and self._entry is not None:
                self._entry.texts[_SOURCE] = text.strip()
            return
        if depth == 3:
            if name in self._TEXTS:
                self._entry.texts[name] = text
        elif depth == 2:
            entry, self._entry = self._entry, None
            try:
                self.found.append(self._package(entry))
            except BadEntry as error:
                self._skip(error)

    def _package(self, entry: _Entry) -> Package:
        file = entry.file(entry.size(entry.attributes.get("size", {}).get("package")))
        if casefold_path(file.path.partition("/")[0]) == "repodata":
            raise BadEntry(
                f"{self._name} names the package {quoted(file.path)}, where only indexes may be"
            )
        version = entry.attributes.get("version", {})
        parts = [version.get(key, "") for key in ("epoch", "ver", "rel")]
        name, arch = entry.texts.get("name", ""), entry.texts.get("arch", "")
        if any(len(part) > MAX_VERSION_CHARS for part in (name, arch, *parts)):
            raise BadEntry(
                f"{quoted(file.path)} has a name or version of more than {MAX_VERSION_CHARS} characters"
            )
        identity = entry.texts.get("checksum", "").strip()
        source = entry.texts.get(_SOURCE, "")
        if arch in SOURCE_ARCHITECTURES:
            source = f"{name}-{parts[1]}-{parts[2]}.{arch}.rpm"
        return Package(name, arch, RpmVersion(*parts), file, self._number, identity, source)

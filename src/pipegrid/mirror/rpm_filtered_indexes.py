"""
Rebuilding of the indexes of an RPM repository: the new ones name only the fetched files, and are signed here.

``primary`` and all indexes with an element for each package (``filelists``, ``other``) keep the elements of
packages that exist and that the filters of any run select. Elements are unchanged except for their positions.
Databases and zchunk files of these indexes are left out, and so are delta packages. All other files stay, and
the new ``repomd.xml`` keeps its revision. The code is synchronous, for the destination's thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from pipegrid.mirror.debian_filtered_indexes import keep_aside
from pipegrid.mirror.debian_index_update import PackedIndex
from pipegrid.mirror.decompression import index_blocks
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.rpm_metadata import (
    MAX_REPOMD_BYTES,
    REPOMD,
    SIGNATURE,
    Metadata,
    Package,
    RawElements,
    Repomd,
    XmlParser,
    read_repomd,
)
from pipegrid.mirror.signatures import GpgKey

_BY_PACKAGE = re.compile(r"primary|filelists(?:-ext)?|other|susedata(?:\.[a-z_A-Z]{1,8})?")
_LEFT_OUT = re.compile(r".*_(?:db|zck)|prestodelta|deltainfo")
_ENDINGS = (".gz", ".xz", ".zst", ".bz2")
_COUNT = re.compile(rb'(\spackages\s*=\s*)(?:"[0-9]{1,12}"|\'[0-9]{1,12}\')')
_ALGORITHMS = ("sha256",)


class Chosen(NamedTuple):
    """
    The packages that a new index names.

    Attributes:
        places: the path of each package, by its position in the repository's ``primary``.
        ids: the identities of the packages, which other indexes use.
    """

    places: Mapping[int, str]
    ids: frozenset[str]


def chosen(destination: Destination, packages: Iterable[Package], wrong: frozenset[str]) -> Chosen:
    """
    Return those of some packages that exist with the right content.

    Args:
        wrong: paths of packages to leave out.
    """
    found = [
        each for each in packages if each.file.path not in wrong and destination.is_there(each.file)
    ]
    places = {each.number: each.file.path for each in found}
    return Chosen(places, frozenset(each.identity for each in found))


def is_rebuilt(each: Metadata) -> bool:
    """Return whether an index has an element for each package, so that it is rebuilt."""
    return _BY_PACKAGE.fullmatch(each.kind) is not None


def is_left_out(each: Metadata) -> bool:
    """Return whether an index is left out, since it would not match the rebuilt ones."""
    return _LEFT_OUT.fullmatch(each.kind) is not None


def rebuilt(
    destination: Destination, repomd: Repomd, wanted: Chosen, key: GpgKey
) -> tuple[Repomd, dict[str, bytes]]:
    """
    Stage new indexes instead of the repository's; return the new ``Repomd``, and ``repomd.xml`` and its
    signature by path.

    Args:
        repomd: the repository's, without indexes that could not be fetched.

    Raises:
        MirrorError, SigningFailed: the disk is full, or gpg made no signature.
        BadEntry: an index cannot be read.
    """
    old = [each for each in repomd.files if is_rebuilt(each)]
    made = {
        each.file.path: _written(destination, each, number, wanted)
        for number, each in enumerate(old)
    }
    keep_aside(destination, made, "")
    rows: list[bytes] = []
    for each in repomd.files:
        if each.file.path in made:
            output, opened = made[each.file.path]
            output.stage(destination)
            rows.append(_row(each, output, opened))
        elif not is_left_out(each):
            rows.append(each.raw)
    text = b"\n".join(
        [
            b'<?xml version="1.0" encoding="UTF-8"?>',
            b'<repomd xmlns="http://linux.duke.edu/metadata/repo"'
            b' xmlns:rpm="http://linux.duke.edu/metadata/rpm">',
            *repomd.head,
            *rows,
            b"</repomd>\n",
        ]
    )
    known = destination.read(REPOMD, MAX_REPOMD_BYTES)
    signature = destination.read(SIGNATURE, MAX_REPOMD_BYTES)
    if known != text or signature is None or not key.has_signed(text, signature):
        signature = key.detached(text)
    return read_repomd(text, f"the new {REPOMD}"), {REPOMD: text, SIGNATURE: signature}


def _row(each: Metadata, output: PackedIndex, opened: PackedIndex) -> bytes:
    """Return the element with which ``repomd.xml`` names a new index."""
    return (
        f"<data type={quoteattr(each.kind)}>"
        f'<checksum type="sha256">{output.file.digest.hex()}</checksum>'
        f'<open-checksum type="sha256">{opened.file.digest.hex()}</open-checksum>'
        f"<location href={quoteattr(output.path)}/><timestamp>{each.timestamp}</timestamp>"
        f"<size>{output.size}</size><open-size>{opened.size}</open-size></data>"
    ).encode()


def _written(
    destination: Destination, each: Metadata, number: int, wanted: Chosen
) -> tuple[PackedIndex, PackedIndex]:
    """
    Write one new index to ``incoming``; return its compressed form, and its decompressed form, which is only
    hashed.
    """
    path = each.file.path
    ending = next((end for end in _ENDINGS if path.endswith(end)), "")
    base = path.removesuffix(ending)
    name = f"reindex.{number}{ending}"
    opened = PackedIndex(destination, base, "", None, _ALGORITHMS)
    told = None if each.opened is None else each.opened.size
    blocks = index_blocks(destination.staged_path(path), path, told)
    with (
        destination.reporting("hold a new index"),
        closing(PackedIndex(destination, base, ending, name, _ALGORITHMS)) as output,
    ):
        for data in _filtered(blocks, path, wanted, each.kind == "primary"):
            output.write(data)
            opened.write(data)
        output.finish(destination)
    kind = each.kind.replace("/", "_")
    output.path = f"repodata/{output.file.digest.hex()}-{kind}.xml{ending}"
    return output, opened


def _filtered(
    blocks: Iterable[bytes], name: str, wanted: Chosen, is_primary: bool
) -> Iterator[bytes]:
    """Yield the bytes of an index with only the elements of wanted packages."""
    reader = _PackageElements(name, wanted, is_primary)
    parser = XmlParser(reader, name)
    reader.raw.parser = parser
    for block in blocks:
        reader.raw.add(block)
        parser.feed(block)
        if reader.found:
            yield b"".join(reader.found)
            reader.found.clear()
        reader.raw.forget()
    parser.end()
    yield from reader.found
    yield b"</%s>\n" % reader.root.encode("utf-8")


class _PackageElements:
    """
    Reads an index from ``XmlParser``: ``found`` has the index's head and the wanted elements, until the
    caller removes them.
    """

    def __init__(self, name: str, wanted: Chosen, is_primary: bool) -> None:
        self.raw = RawElements(name)
        self.root = ""
        self.found: list[bytes] = []
        self._wanted = wanted
        self._is_primary = is_primary
        self._number = -1
        self._begin: int | None = None
        self._location: tuple[int, int] | None = None
        self._identity = ""
        self._is_rpm = False

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        if depth == 1:
            self.root = name
            _, end = self.raw.tag()
            head = self.raw.cut(self.raw.base, end)
            count = b'\\g<1>"%d"' % len(self._wanted.places)
            self.found.append(_COUNT.sub(count, head) + b"\n")
        elif depth == 2:
            self._begin, _ = self.raw.tag()
            self.raw.keep_from = self._begin
            self._location = None
            self._identity = attributes.get("pkgid", "")
            self._is_rpm = name == "package" and attributes.get("type", "rpm") == "rpm"
            self._number += self._is_rpm
        elif depth == 3 and name == "location" and self._is_primary:
            self._location = self.raw.tag()
        return False

    def closed(self, depth: int, name: str, text: str) -> None:
        if depth != 2 or self._begin is None:
            return
        _, end = self.raw.tag()
        begin, self._begin = self._begin, None
        self.raw.keep_from = None
        if not self._is_rpm:
            return
        if not self._is_primary:
            if self._identity in self._wanted.ids:
                self.found.append(self.raw.cut(begin, end) + b"\n")
            return
        place = self._wanted.places.get(self._number)
        if place is not None and self._location is not None:
            first, last = self._location
            is_empty = self.raw.cut(last - 2, last) == b"/>"
            tag = f"<location href={quoteattr(place)}{'/' if is_empty else ''}>".encode()
            self.found.append(self.raw.cut(begin, first) + tag + self.raw.cut(last, end) + b"\n")

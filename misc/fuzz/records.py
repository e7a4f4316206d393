"""The small records of the format: each is read, or refused with the one error that its reader names."""

from __future__ import annotations

from misc.fuzz.choices import Choices
from pipegrid.core import hash_tree, layout, packed_directory, ueb
from pipegrid.core.caps import parse_cap
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.mutable.directory_content_edits import unpack_entries
from pipegrid.core.packed_directory import PackedChild
from pipegrid.core.received_share import BadPart, parse_ueb_length, prove_leaf, read_layout
from pipegrid.errors import DirectoryError, UsageError

_GEOMETRY = Geometry(1000, 3, 10, 300)
_HASHES = (bytes(32), bytes(range(32)), b"\xff" * 32)


def run(data: bytes) -> None:
    """Let the first byte say which reader gets the rest."""
    choices = Choices(data)
    reader = choices.pick((_ueb, _header, _immutable_directory, _directory, _chain))
    reader(choices)


def _ueb(choices: Choices) -> None:
    data = choices.rest()
    try:
        parsed = ueb.parse(data)
    except ValueError:
        return
    assert parsed.segment_bytes >= 1
    assert len(parsed.share_root_hash) == len(parsed.crypttext_root_hash) == 32
    assert sum(map(len, parsed.fields)) + sum(map(len, parsed.fields.values())) <= len(data)
    ueb.disagreements(parsed, _GEOMETRY)


def _header(choices: Choices) -> None:
    total_shares = choices.byte() + 1
    data = choices.rest()
    try:
        parsed = layout.parse_header(data)
    except ValueError:
        return
    assert data.startswith(parsed.pack_header()), "a header is read as another"
    try:
        read_layout(data, total_shares)
    except ValueError:
        return
    try:
        length = parse_ueb_length(data[: parsed.ueb_length_bytes], 0)
    except BadPart:
        return
    assert length <= ueb.MAX_UEB_BYTES


def _immutable_directory(choices: Choices) -> None:
    try:
        children = packed_directory.unpack_immutable(choices.rest())
    except DirectoryError:
        return
    names = [child.name for child in children]
    assert names == sorted(set(names)), "names out of order, or twice"
    try:
        packed = packed_directory.pack_immutable(children)
    except UsageError:
        return  # JSON knows no infinity, though what reads it does
    assert packed_directory.unpack_immutable(packed) == children, (
        "a directory is read back as another"
    )


def _directory(choices: Choices) -> None:
    try:
        names = list(unpack_entries(choices.rest()))
    except DirectoryError:
        return
    assert names == sorted(set(names)), "names out of order, or twice"


def _chain(choices: Choices) -> None:
    total = choices.byte() + 1
    number = choices.below(total)
    chain = choices.rest()
    chain = chain[: len(chain) // layout.CHAIN_ENTRY_BYTES * layout.CHAIN_ENTRY_BYTES]
    try:
        leaf = prove_leaf(chain, number, total, bytes(32), 1000)
    except BadPart as bad:
        assert 1000 <= bad.offset <= 1000 + len(chain)
        return
    # Nobody finds a chain that hashes to zeros; of a single share, the leaf is the root.
    assert total == 1, "a chain was believed"
    assert leaf == bytes(32)


def seeds() -> dict[str, bytes]:
    """Return a good record of each kind."""
    header = layout.for_geometry(_GEOMETRY)
    header2 = layout.for_geometry(_GEOMETRY, 2)
    chain = b"".join(
        number.to_bytes(2, "big") + bytes([number]) * 32 for number in hash_tree.chain_order(10, 4)
    )
    children = [
        PackedChild("a", parse_cap("URI:LIT:ifsgc"), {"tahoe": {"linkcrtime": 1.5}}),
        PackedChild("b\xe4", parse_cap("URI:DIR2-LIT:ifsgc")),
        PackedChild("c", parse_cap("imm.x")),
    ]
    immutable = packed_directory.pack_immutable(children)
    return {
        "ueb": b"\0" + ueb.pack(_GEOMETRY, *_HASHES),
        "header-1": b"\1\x09" + header.pack_header(),
        "header-2": b"\1\x09" + header2.pack_header(),
        "immutable-directory": b"\2" + immutable,
        "directory": b"\3" + immutable,
        "directory-write-caps": b"\3" + _entry(b"x", b"URI:LIT:", b"0123456789abcdef", b"{}"),
        "directory-bad-cap": b"\3" + _entry(b"e\xcc\x81", b"ro.URI:CHK:x", b"", b'{"a":[null]}'),
        "chain": b"\4\x09\4" + chain,
        "chain-of-one": b"\4\0\0" + bytes(34),
    }


def _entry(*fields: bytes) -> bytes:
    packed = b"".join(b"%d:%s," % (len(field), field) for field in fields)
    return b"%d:%s," % (len(packed), packed)

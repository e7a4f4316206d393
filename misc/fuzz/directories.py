"""
Read-write directories, any bytes and any edits: only the errors that are named; names in order, each once;
what no edit names goes back byte for byte; edits take effect once, however often they are applied.
"""

from __future__ import annotations

from misc.fuzz.choices import Choices
from pipegrid.core.caps import parse_cap
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable.directory_content_edits import (
    Edit,
    Link,
    Rename,
    Unlink,
    apply_edits,
    content_if_applied,
    merge_directories,
    pack_entries,
    unpack_entries,
)
from pipegrid.core.text import composed
from pipegrid.errors import CapError, DirectoryError, UsageError

_WRITEKEY = bytes(range(16))
_KEYS = "7tyheyvis44e2gjizd6myuoo3q:mrswmz3infvgw3dnnzxxa4lson2hk5txpb4xu634pv7h7aebqkbq"
_CAPS = (
    "URI:LIT:ifsgc",
    f"URI:SSK:{_KEYS}",
    f"URI:DIR2-MDMF-RO:{_KEYS}",
    f"URI:SSK-Verifier:{_KEYS}",
    "ro.x",
    "imm.x",
    "x",
    "",
)
_NAMES = ("a", "b", "e\u0301", "\xe9", "", "a/b", "..", "\ud800")


def run(data: bytes) -> None:
    """Make edits of the front, a directory of the rest, and let them meet."""
    choices = Choices(data)
    changes = [_edit(choices) for _ in range(choices.below(6))]
    split = choices.number(2)
    rest = choices.rest()
    try:
        before = unpack_entries(rest)
    except DirectoryError as error:
        assert "\n" not in str(error)
        return
    assert list(before) == sorted(set(before)), "names out of order, or twice"
    assert unpack_entries(pack_entries(before)) == before, "read back as another"
    for entry in before.values():
        entry.write_cap(_WRITEKEY)
        assert entry.read_cap is None or str(entry.read_cap)
        assert entry.metadata is None or isinstance(entry.metadata, dict)
    _apply(rest, changes)
    try:
        other = unpack_entries(rest[:split])
    except DirectoryError:
        return
    merged = merge_directories(rest, rest[:split])
    assert merged == merge_directories(rest[:split], rest), "the order of two heads matters"
    assert unpack_entries(merged).keys() == before.keys() | other.keys(), "an entry is lost"


def _apply(data: bytes, changes: list[Edit]) -> None:
    before = unpack_entries(data)
    try:
        packed = apply_edits(data, changes, _WRITEKEY, 1.5)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    after = unpack_entries(packed)
    named = set()
    for change in changes:
        names = (change.old, change.new) if isinstance(change, Rename) else (change.name,)
        named |= {composed(name) for name in names}
    for name, entry in before.items():
        assert name in named or after.get(name) == entry, "an entry that nobody named has changed"
    assert not after.keys() - before.keys() - named, "an entry has come from nowhere"
    found = content_if_applied(data, packed, packed)
    is_new = any(before.get(name) != entry for name, entry in after.items())
    assert found == (packed if is_new else None), "edits are not found where they were made"
    assert not is_new or content_if_applied(data, packed, data) is None, (
        "edits are found that were not made"
    )
    if not any(isinstance(change, Rename) for change in changes):
        again = apply_edits(packed, changes, _WRITEKEY, 1.5, repeated=True)
        assert unpack_entries(again).keys() == after.keys(), "edits take effect twice"


def _edit(choices: Choices) -> Edit:
    name = choices.pick(_NAMES)
    kind = choices.below(3)
    if kind == 1:
        return Unlink(name, must_exist=choices.flag())
    if kind == 2:
        return Rename(name, choices.pick(_NAMES), replace=not choices.flag())
    caps = [parse_cap(choices.pick(_CAPS))]
    if choices.flag():
        try:
            caps.append(parse_cap(choices.take(choices.below(20)).decode("latin-1")))
        except CapError:
            caps.append(parse_cap("ro.y"))
    metadata = choices.pick((None, {}, {"no-write": True}, {"x": float("inf")}))
    return Link(name, caps[0], caps[1] if len(caps) > 1 else None, metadata)


def seeds() -> dict[str, bytes]:
    """Return directories, and edits of each kind for them."""
    links = [
        Link("a", parse_cap(_CAPS[1])),
        Link("\xe9", parse_cap("imm.x")),
        Link("z", parse_cap(_CAPS[0])),
    ]
    good = apply_edits(b"", links, _WRITEKEY, 1.5)
    odd = netstring(b"".join(map(netstring, (b"o", b"URI:CHK:wrong", b"abc", b"no"))))
    return {
        "good": b"\0\0\x40" + good,
        "halves": b"\0" + good.index(b",,").to_bytes(2, "big") + good,
        "link": b"\1\0\0\1\0\1\0\0" + good,
        "unlink": b"\1\0\1\1\0\0" + good,
        "rename": b"\1\0\2\1\0\0\0" + good,
        "unknown": b"\1\0\0\6\1\x04ro.y\0\0\0" + good,
        "odd": b"\1\0\1\1\0\0\0" + odd + good,
        "empty": b"\2\0\0\0\0\0\3\1\1\0\0",
    }

"""Read-write directories: recorded ones byte for byte, edits that can be applied again, hostile bytes."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, UnknownCap, parse_cap
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable import directory_content_edits
from pipegrid.core.mutable.directory_content_edits import (
    MAX_METADATA_BYTES,
    MAX_METADATA_DEPTH,
    MAX_NAME_BYTES,
    MEMORY_MULTIPLE,
    Edit,
    Link,
    Rename,
    Unlink,
    apply_edits,
    decrypt_write_cap,
    encrypt_write_cap,
    merge_directories,
    new_entry,
    pack_entries,
    parse_metadata,
    unpack_entries,
)
from pipegrid.core.packed_directory import entry_fields
from pipegrid.errors import ChildExists, DirectoryError, NoSuchChild, UsageError
from tests import vectors

EXAMPLES = settings(max_examples=150, deadline=None, derandomize=True)
W = bytes(range(16))
KEY_AND_HASH = "7tyheyvis44e2gjizd6myuoo3q:mrswmz3infvgw3dnnzxxa4lson2hk5txpb4xu634pv7h7aebqkbq"
SSK = f"URI:SSK:{KEY_AND_HASH}"
CHK = f"URI:CHK:{KEY_AND_HASH}:3:10:1234"
LIT = parse_cap("URI:LIT:ifsgc")


def child(spelled: dict[str, Any]) -> tuple[Cap, Cap | None]:
    """Return the caps that a recorded child was given with."""
    write = spelled.get("rw_uri")
    cap = parse_cap(write or spelled["ro_uri"])
    known = write is None or not isinstance(cap, UnknownCap)
    return cap, None if known else parse_cap(spelled["ro_uri"])


def stored(
    name: bytes = b"n", cap: bytes = b"URI:LIT:", rw: bytes = b"", metadata: bytes = b"{}"
) -> bytes:
    """Return one entry as it stands in a directory."""
    return netstring(b"".join(map(netstring, (name, cap, rw, metadata))))


def listing(data: bytes) -> dict[str, tuple[str, str, Any]]:
    """Return write cap, read cap and metadata by name."""
    return {
        name: (str(e.write_cap(W) or ""), str(e.read_cap or ""), e.metadata)
        for name, e in unpack_entries(data).items()
    }


class RecordedDirectoryTests(SynchronousTestCase):
    """What Tahoe-LAFS wrote."""

    def test_write_caps(self) -> None:
        """Recorded write caps are encrypted to the recorded bytes, and decrypted."""
        for case in vectors.load("directories")["rwcap_encryption"]:
            key, encrypted = bytes.fromhex(case["writekey"]), bytes.fromhex(case["encrypted"])
            self.assertEqual(encrypt_write_cap(case["rwcap"], key), encrypted)
            self.assertEqual(decrypt_write_cap(encrypted, key), case["rwcap"])
            self.assertNotEqual(decrypt_write_cap(encrypted, W), case["rwcap"] or "?")
        self.assertEqual(decrypt_write_cap(b"", W), "")
        self.assertIsNone(decrypt_write_cap(bytes(47), W))

    def test_packed(self) -> None:
        """Recorded children give the recorded bytes."""
        for case in vectors.load("directories")["readwrite"]:
            key = bytes.fromhex(case["writekey"])
            made = [
                new_entry(Link(c["name"], parse_cap(c["cap"]), None, c["metadata"]), key)
                for c in case["children"]
            ]
            packed = pack_entries({entry.name: entry for entry in made})
            self.assertEqual(packed.hex(), case["packed_hex"])

    def test_made_with_children(self) -> None:
        """The recorded directories of the tree vectors are packed from what was given."""
        for case in vectors.load("trees")["mutable_directories"]:
            key = self._key(case)
            links = []
            for name, (_, spelled) in case["given_children"].items():
                cap, read_cap = child(spelled)
                links.append(Link(name, cap, read_cap, spelled.get("metadata")))
            first = case["versions"][0]
            if "mkdir-with-children" in first["after"]:
                made = {entry.name: entry for entry in (new_entry(each, key) for each in links)}
                packed = pack_entries(made)
            else:
                now = first["listing"][0]["metadata"]["tahoe"]["linkmotime"]
                packed = apply_edits(b"", links, key, now)
            self.assertEqual(packed.hex(), first["packed_hex"], case["name"])

    def test_listed(self) -> None:
        """Recorded directories are listed as Tahoe-LAFS lists them, with and without the write key."""
        for case in vectors.load("trees")["mutable_directories"]:
            key = self._key(case)
            for version in case["versions"]:
                data = bytes.fromhex(version["packed_hex"])
                unpacked = unpack_entries(data)
                self.assertEqual(pack_entries(unpacked), data)
                self.assertEqual([each["name"] for each in version["listing"]], list(unpacked))
                for told in version["listing"]:
                    entry = unpacked[told["name"]]
                    write = entry.write_cap(key)
                    self.assertEqual(write and str(write), told.get("rw_uri"))
                    shown = str(entry.read_cap)
                    self.assertEqual(shown, told["ro_uri"])
                    self.assertEqual(entry.metadata, told["metadata"])
                for told in version["listing_readonly"]:
                    self.assertEqual(str(unpacked[told["name"]].read_cap), told["ro_uri"])

    def test_changed(self) -> None:
        """The recorded change, applied to the recorded directory, gives the recorded one after it."""
        for case in vectors.load("trees")["mutable_directories"]:
            before, after = (bytes.fromhex(v["packed_hex"]) for v in case["versions"])
            now = unpack_entries(after)["é"].metadata["tahoe"]["linkmotime"]  # type: ignore[index]
            changes: list[Edit] = [
                Link("e\u0301", parse_cap(SSK), metadata={"no-write": True, "x": 1, "tahoe": 5}),
                Unlink("lit"),
            ]
            self.assertEqual(apply_edits(before, changes, self._key(case), now), after)

    def _key(self, case: dict[str, Any]) -> bytes:
        cap = parse_cap(case["rw_cap"])
        assert isinstance(cap, DirectoryCap)
        assert isinstance(cap.file, MutableCap)
        return cap.file.secret


class EditTests(SynchronousTestCase):
    """Changes to directories."""

    def test_link_times_and_metadata(self) -> None:
        """The time of creation stays, that of the last link is new; metadata stays unless it is given."""
        data = apply_edits(b"", [Link("a", LIT, metadata={"x": 1})], W, 100.5)
        self.assertEqual(
            listing(data)["a"][2], {"x": 1, "tahoe": {"linkcrtime": 100.5, "linkmotime": 100.5}}
        )
        data = apply_edits(data, [Link("a", parse_cap(CHK))], W, 200.25)
        self.assertEqual(
            listing(data)["a"],
            ("", CHK, {"x": 1, "tahoe": {"linkcrtime": 100.5, "linkmotime": 200.25}}),
        )
        data = apply_edits(data, [Link("a", LIT, metadata={})], W, 300)
        self.assertEqual(listing(data)["a"][2], {"tahoe": {"linkcrtime": 100.5, "linkmotime": 300}})

    def test_old_metadata(self) -> None:
        """What older writers called ``ctime`` becomes the time of creation; unknown keys are kept."""
        data = stored(b"a", metadata=b'{"ctime": 7.5, "q": [1]}')
        data = apply_edits(data, [Link("a", LIT)], W, 9)
        self.assertEqual(
            listing(data)["a"][2],
            {"ctime": 7.5, "q": [1], "tahoe": {"linkcrtime": 7.5, "linkmotime": 9}},
        )
        data = stored(b"a", metadata=b'{"tahoe": {"linkcrtime": "x", "more": 1}}')
        data = apply_edits(data, [Link("a", LIT)], W, 9)
        self.assertEqual(
            listing(data)["a"][2], {"tahoe": {"linkcrtime": 9, "more": 1, "linkmotime": 9}}
        )

    def test_no_write(self) -> None:
        """A child marked ``no-write`` is stored for reading, also when it is linked again."""
        link = Link("a", parse_cap(SSK))
        self.assertEqual(listing(apply_edits(b"", [link], W, 1))["a"][0], SSK)
        data = apply_edits(b"", [Link("a", parse_cap(SSK), metadata={"no-write": True})], W, 1)
        self.assertEqual(listing(data)["a"][0], "")
        self.assertTrue(listing(data)["a"][1].startswith("URI:SSK-RO:"))
        self.assertEqual(listing(apply_edits(data, [link], W, 2))["a"][0], "")
        again = Link("a", parse_cap(SSK), metadata={})
        self.assertEqual(listing(apply_edits(data, [again], W, 2))["a"][0], SSK)

    def test_caps_of_all_kinds(self) -> None:
        """Each cap is stored with what it grants; unknown ones only with their promise."""
        for cap, read_cap, write, read in (
            (CHK, None, "", CHK),
            (SSK, None, SSK, str(parse_cap(SSK).readonly())),  # type: ignore[union-attr]
            (
                f"URI:DIR2-MDMF:{KEY_AND_HASH}",
                None,
                f"URI:DIR2-MDMF:{KEY_AND_HASH}",
                "URI:DIR2-MDMF-RO:",
            ),
            (f"URI:DIR2-RO:{KEY_AND_HASH}", None, "", f"URI:DIR2-RO:{KEY_AND_HASH}"),
            ("ro.lafs://x", None, "", "ro.lafs://x"),
            ("imm.lafs://x", None, "", "imm.lafs://x"),
            ("lafs://w", "lafs://r", "lafs://w", "ro.lafs://r"),
            ("lafs://w", "ro.lafs://r", "lafs://w", "ro.lafs://r"),
            (f"imm.{CHK}", None, "", CHK),
        ):
            link = Link("a", parse_cap(cap), None if read_cap is None else parse_cap(read_cap))
            told = listing(apply_edits(b"", [link], W, 1))["a"]
            self.assertEqual(told[0], write)
            self.assertTrue(told[1].startswith(read), told)
        entry = unpack_entries(apply_edits(b"", [Link("a", parse_cap("ro.lafs://x"))], W, 1))["a"]
        self.assertEqual(entry_fields(entry.stored)[1], b"lafs://x")
        told = listing(apply_edits(b"", [Link("a", parse_cap(""))], W, 1))["a"]
        self.assertEqual(
            tuple(told[:2]), ("", ""), "a child without a cap, as Tahoe-LAFS stores it"
        )

    def test_refuses_other_caps(self) -> None:
        """Verifier caps, unknown ones without promise, and broken promises are refused with a sentence."""
        for cap, read_cap in (
            (f"URI:SSK-Verifier:{KEY_AND_HASH}", None),
            (f"URI:CHK-Verifier:{KEY_AND_HASH}:3:10:5", None),
            (f"URI:DIR2-Verifier:{KEY_AND_HASH}", None),
            ("lafs://w", None),
            ("lafs://w", "imm.lafs://r"),
            (f"ro.{SSK}", None),
            (f"imm.URI:SSK-RO:{KEY_AND_HASH}", None),
            ("lafs://w", SSK),
            ("ro.ro.x", None),
            ("ro.", None),
            (CHK, SSK),
        ):
            link = Link("a", parse_cap(cap), None if read_cap is None else parse_cap(read_cap))
            error = self.assertRaises(UsageError, apply_edits, b"", [link], W, 1)
            self.assertNotIn("\n", str(error))
            self.assertNotIn(KEY_AND_HASH, str(error))

    def test_unlink_and_rename(self) -> None:
        """Children go and move, with their write caps and metadata; the times of linking are new."""
        links = [Link("a", parse_cap(SSK), metadata={"x": 1}), Link("b", LIT), Link("c", LIT)]
        data = apply_edits(b"", links, W, 1)
        data = apply_edits(data, [Unlink("b"), Rename("a", "z")], W, 5)
        self.assertEqual(list(listing(data)), ["c", "z"])
        self.assertEqual(listing(data)["z"][0], SSK)
        self.assertEqual(
            listing(data)["z"][2], {"x": 1, "tahoe": {"linkcrtime": 5, "linkmotime": 5}}
        )
        self.assertEqual(apply_edits(data, [Rename("z", "z")], W, 9), data)
        self.assertEqual(list(listing(apply_edits(data, [Rename("c", "z")], W, 9))), ["z"])

    def test_names_are_composed(self) -> None:
        """A child is found under any spelling of its name; stored, it is in NFC; the rest keeps its bytes."""
        old = stored("o\u0308".encode()) + stored("e\u0301".encode())
        self.assertEqual(list(unpack_entries(old)), ["é", "ö"])
        data = apply_edits(old, [Link("u\u0308", LIT), Unlink("é")], W, 1)
        self.assertEqual(list(unpack_entries(data)), ["ö", "ü"])
        self.assertTrue(data.startswith(stored("o\u0308".encode())))
        self.assertIn("ü".encode(), data)

    def test_refusals_change_nothing(self) -> None:
        """A missing child, and one that is there, are errors of their own, and no edit takes effect."""
        data = apply_edits(b"", [Link("a", LIT), Link("b", LIT)], W, 1)
        for edit, kind in (
            (Unlink("x"), NoSuchChild),
            (Rename("x", "y"), NoSuchChild),
            (Rename("a", "b", replace=False), ChildExists),
            (Link("b", LIT, replace=False), ChildExists),
            (Link("a\ud800", LIT), UsageError),
            (Link("x" * (MAX_NAME_BYTES + 1), LIT), UsageError),
            (Rename("a", "x" * (MAX_NAME_BYTES + 1)), UsageError),
            (Link("x", LIT, metadata={"a": float("nan")}), UsageError),
            (Link("x", LIT, metadata={"a": "x" * MAX_METADATA_BYTES}), UsageError),
            (Link("x", LIT, metadata={"a": object()}), UsageError),
        ):
            error = self.assertRaises(kind, apply_edits, data, [Link("new", LIT), edit], W, 2)
            self.assertNotIn("\n", str(error))
        self.assertEqual(apply_edits(data, [Unlink("x", must_exist=False)], W, 2), data)
        deep: Any = 1
        for _ in range(MAX_METADATA_DEPTH):
            deep = [deep]
        self.assertRaises(
            UsageError, apply_edits, data, [Link("x", LIT, metadata={"d": deep})], W, 2
        )

    def test_what_nobody_changes_stays(self) -> None:
        """Broken promises, unknown caps, foreign secrets and odd metadata go back as they were."""
        odd = [
            stored(b"a", b"imm.URI:SSK-RO:" + KEY_AND_HASH.encode(), b"foreign"),
            stored(b"b", b"URI:CHK:malformed", bytes(60), b"not json"),
            stored(b"c", b"", b"", b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
            stored(b"d", b"lafs://future", b"\xff" * 100, b'{"a":1,"a":2}'),
            stored(b"\0/../", b"URI:SSK:" + KEY_AND_HASH.encode() + b"   "),
            stored(b""),
        ]
        data = b"".join(odd)
        after = apply_edits(data, [Link("new", LIT), Unlink("new")], W, 1)
        self.assertEqual(sorted(odd), sorted(stored_parts(after)))
        moved = apply_edits(data, [Rename("b", "z")], W, 1)
        entry = unpack_entries(moved)["z"]
        self.assertEqual(
            entry_fields(entry.stored)[1:], (b"URI:CHK:malformed", bytes(60), b"not json")
        )
        self.assertIsInstance(entry.read_cap, UnknownCap)
        self.assertIsNone(entry.metadata)
        for each in unpack_entries(data).values():
            each.write_cap(W)

    def test_applied_again(self) -> None:
        """Edits that had taken effect before take effect again, and nothing of them is an error."""
        data = apply_edits(b"", [Link("a", LIT), Link("b", LIT)], W, 1)
        changes: list[Edit] = [Unlink("a"), Rename("b", "c"), Link("d", LIT, replace=False)]
        once = apply_edits(data, changes, W, 2)
        twice = apply_edits(once, changes, W, 2, repeated=True)
        self.assertEqual(list(listing(twice)), ["c", "d"])
        self.assertRaises(UsageError, apply_edits, once, changes, W, 2)
        other = [Link("d", parse_cap(CHK), replace=False)]
        self.assertRaises(ChildExists, apply_edits, once, other, W, 2, repeated=True)
        moved: list[Edit] = [Link("a", LIT), Rename("a", "z", replace=False)]
        once_moved = apply_edits(data, moved, W, 2)
        again = apply_edits(once_moved, moved, W, 2, repeated=True)
        self.assertEqual(list(listing(again)), ["b", "z"])
        gone = [Rename("x", "y")]
        self.assertRaises(NoSuchChild, apply_edits, once, gone, W, 2, repeated=True)

    @EXAMPLES
    @given(
        st.lists(
            st.one_of(
                st.builds(Link, st.sampled_from("abcd"), st.sampled_from([LIT, parse_cap(SSK)])),
                st.builds(Unlink, st.sampled_from("abcd"), st.just(False)),
            ),
            max_size=8,
        )
    )
    def test_edits_in_turn_or_together(self, changes: list[Edit]) -> None:
        """Many edits in one publish are what they are one by one."""
        together = apply_edits(b"", changes, W, 1)
        one_by_one = b""
        for change in changes:
            one_by_one = apply_edits(one_by_one, [change], W, 1)
        self.assertEqual(together, one_by_one)

    def test_merge(self) -> None:
        """Of two heads every entry is there, of one name the later; in either order."""
        base = apply_edits(b"", [Link("a", LIT), Link("b", LIT)], W, 1)
        first = apply_edits(base, [Link("x", LIT), Link("a", parse_cap(CHK))], W, 5)
        second = apply_edits(base, [Link("y", LIT), Link("a", parse_cap(SSK)), Unlink("b")], W, 6)
        merged = merge_directories(first, second)
        self.assertEqual(merged, merge_directories(second, first))
        self.assertEqual(list(listing(merged)), ["a", "b", "x", "y"])
        self.assertEqual(listing(merged)["a"][0], SSK)
        self.assertEqual(merge_directories(first, first), first)
        self.assertEqual(merge_directories(b"", second), second)
        odd = stored(b"a", metadata=b'{"tahoe": {"linkmotime": "later"}}')
        self.assertEqual(listing(merge_directories(odd, second))["a"], listing(second)["a"])

    def test_what_was_replaced_is_older(self) -> None:
        """Whatever clock linked it: a merge with a version that has it still does not bring it back."""
        edits: tuple[list[Edit], ...] = (
            [Link("a", parse_cap(CHK))],
            [Unlink("a"), Link("a", parse_cap(CHK))],
            [Link("b", parse_cap(CHK)), Rename("b", "a")],
        )
        for linked_at in (1.0, 5.0, 2e9):
            base = apply_edits(b"", [Link("a", LIT)], W, linked_at)
            beside = apply_edits(base, [Link("x", LIT)], W, 5.0)
            for edit in edits:
                after = apply_edits(base, edit, W, 5.0)
                for merged in (
                    merge_directories(after, beside),
                    merge_directories(beside, after),
                ):
                    self.assertEqual(listing(merged)["a"][1], CHK)
        self.assertEqual(
            listing(apply_edits(base, edits[0], W, 3e9))["a"][2]["tahoe"]["linkmotime"], 3e9
        )


def stored_parts(data: bytes) -> list[bytes]:
    """Return the entries as they stand in a directory."""
    return [netstring(entry.stored) for entry in unpack_entries(data).values()]


class BoundsTests(SynchronousTestCase):
    """What hostile directories cost."""

    def test_memory(self) -> None:
        """A directory of the shortest entries takes no more than the stated multiple of its bytes."""
        data = b"".join(stored(b"%04x" % i, b"", b"", b"") for i in range(20_000))
        wide = b"".join(stored(f"\U0001f600{i:x}".encode(), b"", b"", b"") for i in range(20_000))
        for packed in (data, wide):
            tracemalloc.start()
            try:
                unpacked = unpack_entries(packed)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertEqual(len(unpacked), 20_000)
            self.assertLess(peak, MEMORY_MULTIPLE * len(packed))

    def test_limits(self) -> None:
        """Too many bytes or entries are refused by name, reading and writing."""
        self.patch(directory_content_edits, "MAX_ENTRIES", 3)
        three = b"".join(stored(name) for name in (b"a", b"b", b"c"))
        self.assertEqual(len(unpack_entries(three)), 3)
        self.assertRaises(DirectoryError, unpack_entries, three + stored(b"d"))
        self.patch(directory_content_edits, "MAX_CHILDREN", 3)
        self.assertRaises(UsageError, apply_edits, three, [Link("d", LIT)], W, 1)
        self.patch(directory_content_edits, "MAX_CHILDREN", 1)
        self.assertRaises(UsageError, apply_edits, three, [Link("d", LIT)], W, 1)
        self.assertEqual(len(unpack_entries(apply_edits(three, [Unlink("a")], W, 1))), 2)
        self.patch(directory_content_edits, "MAX_DIRECTORY_BYTES", len(three))
        self.patch(directory_content_edits, "MAX_DIRECTORY_BYTES", len(three))
        self.assertEqual(len(unpack_entries(three)), 3)
        self.assertRaises(DirectoryError, unpack_entries, three + b"x")
        self.assertRaises(UsageError, apply_edits, three, [Rename("a", "longer")], W, 1)

    def test_metadata_bounds(self) -> None:
        """Metadata that is too long or deep, or no object, is as none; brackets in strings are no depth."""
        deepest = (
            b'{"a":' + b"[" * (MAX_METADATA_DEPTH - 1) + b"]" * (MAX_METADATA_DEPTH - 1) + b"}"
        )
        self.assertIsNotNone(parse_metadata(deepest))
        self.assertIsNone(parse_metadata(b'{"b":' + deepest + b"}"))
        self.assertIsNotNone(parse_metadata(b'{"a": "' + b'[\\"{\\\\' * 500 + b'"}'))
        self.assertIsNone(parse_metadata(b'{"a": "' + b"x" * MAX_METADATA_BYTES + b'"}'))
        for bad in (b"", b"[]", b"1", b"\xff", b'{"a": ' + b"1" * 10_000 + b"}", b"[" * 60_000):
            self.assertIsNone(parse_metadata(bad))

    def test_metadata_memory(self) -> None:
        """Reading metadata takes no more than the multiple of its bytes."""
        for unit in (b"[],", b"{},", b"0,", b"1e9,", b'"a",'):
            data = b'{"a":[' + unit * (40_000 // len(unit)) + b"0]}"
            tracemalloc.start()
            try:
                self.assertIsNotNone(parse_metadata(data))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            self.assertLess(peak, MEMORY_MULTIPLE * len(data), unit)

    def test_marks_are_not_composed_forever(self) -> None:
        """A name of 100,000 combining marks in the worst order is read at once, and left as it is."""
        name = "a" + "\u0301" * 50_000 + "\u0323" * 50_000
        data = stored(name.encode())
        self.assertEqual(list(unpack_entries(data)), [name])
        short = "a" + "\u0301" * 3 + "\u0323"
        self.assertEqual(list(unpack_entries(stored(short.encode()))), ["\u1ea1" + "\u0301" * 3])

    def test_damage(self) -> None:
        """Any byte changed: a directory, or a DirectoryError; whatever is read can be written again."""
        links = [Link(n, parse_cap(c)) for n, c in (("a", SSK), ("é", CHK), ("z", "ro.x"))]
        data = apply_edits(b"", links, W, 1.5)
        rng = random.Random(4)
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] = rng.randrange(256)
            try:
                unpacked = unpack_entries(bytes(damaged))
            except DirectoryError as error:
                self.assertNotIn("\n", str(error))
                continue
            self.assertEqual(unpack_entries(pack_entries(unpacked)), unpacked)
            for entry in unpacked.values():
                entry.write_cap(W)
                self.assertTrue(entry.read_cap is None or str(entry.read_cap) is not None)
                self.assertTrue(entry.metadata is None or json.dumps(entry.metadata))
            apply_edits(bytes(damaged), [Link("a", LIT), Rename("a", "b")], W, 2)

"""Directories pack to the recorded bytes, and damaged ones fail with one kind of error."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap, parse_cap
from pipegrid.core.hashes import netstring
from pipegrid.core.mutable.directory_content_edits import unpack_entries
from pipegrid.core.packed_directory import (
    PackedChild,
    directory_cap,
    pack_immutable,
    unpack_immutable,
)
from pipegrid.errors import CapError, DirectoryError, UsageError
from tests import vectors

CASES = vectors.load("directories")
LIT = parse_cap("URI:LIT:ifsgc")
KEY_AND_HASH = "7tyheyvis44e2gjizd6myuoo3q:mrswmz3infvgw3dnnzxxa4lson2hk5txpb4xu634pv7h7aebqkbq"
CHK = f"URI:CHK:{KEY_AND_HASH}:3:10:1234"
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
caps = st.sampled_from(
    [
        "URI:LIT:",
        "URI:LIT:ifsgc",
        CHK,
        CHK.replace("CHK", "DIR2-CHK"),
        "URI:DIR2-LIT:",
        "imm.lafs://from_the_future",
    ]
).map(parse_cap)
children = st.builds(
    PackedChild,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    caps,
    st.dictionaries(st.text(max_size=5), json_values, max_size=3).filter(
        lambda metadata: "inf" not in repr(metadata)
    ),
)


def entry(
    name: bytes = b"n", cap: bytes = b"URI:LIT:", rw_data: bytes = b"", metadata: bytes = b"{}"
) -> bytes:
    """Return one entry as stored."""
    return netstring(b"".join(netstring(field) for field in (name, cap, rw_data, metadata)))


class ImmutableDirectoryTests(SynchronousTestCase):
    """Packing and unpacking."""

    def test_recorded_directories(self) -> None:
        """The recorded children pack to the recorded bytes and come back from them."""
        for case in CASES["immutable"]:
            given_children = [
                PackedChild(child["name"], parse_cap(child["cap"]), child["metadata"])
                for child in case["children"]
            ]
            packed = bytes.fromhex(case["packed_hex"])
            self.assertEqual(pack_immutable(given_children), packed, case["name"])
            unpacked = unpack_immutable(packed)
            self.assertEqual(
                {str(child.cap) for child in unpacked}, {str(child.cap) for child in given_children}
            )
            self.assertEqual(pack_immutable(unpacked), packed)
        self.assertEqual(len(CASES["immutable"]), 5)

    def test_recorded_caps(self) -> None:
        """The recorded dircaps are read, and wrap the file that holds the packed bytes."""
        for case in CASES["immutable"]:
            packed = bytes.fromhex(case["packed_hex"])
            cap = parse_cap(case["dircap"])
            assert isinstance(cap, DirectoryCap)
            self.assertEqual(str(cap), case["dircap"])
            if isinstance(cap.file, LitCap):
                self.assertEqual(cap, directory_cap(LitCap(packed)))
            else:
                self.assertEqual(str(cap.verifier()), case["verifycap"])
                self.assertEqual(cap.file.size, len(packed))  # type: ignore[union-attr]

    def test_names_are_composed_and_sorted(self) -> None:
        """Names are stored and returned in NFC, in order of code points."""
        names = ["é", "z", "Z", "\U0001f600", "￿", "e\u0301t", "a"]
        packed = pack_immutable(PackedChild(name, LIT) for name in names)
        returned = [child.name for child in unpack_immutable(packed)]
        self.assertEqual(returned, ["Z", "a", "z", "é", "ét", "￿", "\U0001f600"])
        stored = entry(name="e\u0301".encode())
        self.assertEqual([child.name for child in unpack_immutable(stored)], ["é"])

    def test_metadata_has_one_form(self) -> None:
        """JSON is written with spaces, escapes and keys in the order given."""
        packed = pack_immutable([PackedChild("n", LIT, {"z": [1, 2.0], "a": {"é": None}})])
        self.assertIn(rb'{"z": [1, 2.0], "a": {"\u00e9": null}}', packed)
        self.assertIn(b"2:{},", pack_immutable([PackedChild("n", LIT)]))

    def test_refuses_children_that_could_change(self) -> None:
        """Only caps that can never mean anything else may be packed."""
        for text in (
            f"URI:SSK-RO:{KEY_AND_HASH}",
            f"URI:SSK:{KEY_AND_HASH}",
            f"URI:DIR2-RO:{KEY_AND_HASH}",
            f"URI:CHK-Verifier:{KEY_AND_HASH}:3:10:1234",
            f"imm.URI:SSK-RO:{KEY_AND_HASH}",
            f"URI:DIR2-CHK-Verifier:{KEY_AND_HASH}:3:10:1234",
            "ro.lafs://from_the_future",
            "lafs://from_the_future",
            "imm.ro.x",
            "imm.",
        ):
            with self.assertRaises(UsageError, msg=text):
                pack_immutable([PackedChild("n", parse_cap(text))])

    def test_refuses_what_cannot_be_written(self) -> None:
        """Equal names, names outside Unicode and metadata outside JSON are refused."""
        circle: dict[str, Any] = {}
        circle["self"] = circle
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for bad in (
            [PackedChild("é", LIT), PackedChild("e\u0301", LIT)],
            [PackedChild("\ud800", LIT)],
            [PackedChild("n", LIT, {"x": b"bytes"})],
            [PackedChild("n", LIT, {"x": float("nan")})],
            [PackedChild("n", LIT, circle)],
            [PackedChild("n", LIT, {"x": deep})],
        ):
            self.assertRaises(UsageError, pack_immutable, bad)

    def test_drops_children_that_may_not_be_there(self) -> None:
        """Children that could change, or are damaged, are left out; the others stay."""
        data = b"".join(
            entry(name=b"%d" % number, cap=cap.encode("utf-8"))
            for number, cap in enumerate(
                (
                    CHK,
                    f"URI:SSK-RO:{KEY_AND_HASH}",
                    f"imm.URI:SSK:{KEY_AND_HASH}",
                    "URI:CHK:damaged",
                    "",
                    "ro.x",
                    "ro." + CHK,
                    "imm." + CHK + "  ",
                    f"URI:DIR2:{KEY_AND_HASH}",
                )
            )
        )
        self.assertEqual(
            [(child.name, str(child.cap)) for child in unpack_immutable(data)],
            [("0", CHK), ("6", CHK), ("7", CHK)],
        )

    def test_unknown_children(self) -> None:
        """The directory's own promise stands for the prefix that is not stored."""
        child = PackedChild("n", UnknownCap("imm.lafs://x"))
        packed = pack_immutable([child])
        self.assertIn(b"8:lafs://x,", packed)
        self.assertEqual(unpack_immutable(packed), [child])

    def test_refuses_write_caps(self) -> None:
        """An immutable directory with a write cap in it is none."""
        self.assertRaises(DirectoryError, unpack_immutable, entry(rw_data=b"x"))

    def test_last_of_equal_names_counts(self) -> None:
        """Names that become equal by composition are one child, the last."""
        data = entry(name="é".encode()) + entry(name="e\u0301".encode(), cap=b"URI:LIT:ifsgc")
        self.assertEqual(unpack_immutable(data), [PackedChild("é", LIT)])

    def test_refuses_damage(self) -> None:
        """Whatever is wrong, it is a DirectoryError that says where."""
        good = entry()
        fields = b"".join(netstring(field) for field in (b"n", b"URI:LIT:", b"", b"{}"))
        for bad in (
            b"x",
            b":",
            b"5",
            b"1:",
            b"1:a",
            b"-1:,",
            b"+1:a,",
            b"01:a,",
            b"9999999999999999:a,",
            b"9" * 5000 + b":a,",
            "٣:abc,".encode(),
            good[:-1],
            netstring(b""),
            netstring(fields[:-1]),
            netstring(fields + b"0:,"),
            netstring(netstring(b"n") * 3),
            entry(name=b"\xff"),
            entry(cap=b"\xff"),
        ):
            for unpack in (unpack_immutable, unpack_entries):
                with self.assertRaises(DirectoryError, msg=repr(bad[:60])) as caught:
                    unpack(good + bad)
                self.assertIn(f"byte {len(good)}", str(caught.exception))

    def test_damaged_metadata(self) -> None:
        """It is an error in an immutable directory; in another one the rest of the child is read."""
        good = entry()
        for wrong in (b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000):
            bad = good + entry(metadata=wrong)
            with self.assertRaises(DirectoryError) as caught:
                unpack_immutable(bad)
            self.assertIn(f"byte {len(good)}", str(caught.exception))
            self.assertIsNone(unpack_entries(bad)["n"].metadata)

    @EXAMPLES
    @given(st.lists(children, max_size=5))
    def test_round_trip(self, given_children: list[PackedChild]) -> None:
        """What is packed comes back, sorted."""
        try:
            packed = pack_immutable(given_children)
        except UsageError as error:
            self.assertIn("two children", str(error))
            return
        unpacked = unpack_immutable(packed)
        self.assertEqual(pack_immutable(unpacked), packed)
        self.assertEqual(len(unpacked), len(given_children))
        key = str
        self.assertEqual(
            sorted(key((str(c.cap), c.metadata)) for c in unpacked),
            sorted(key((str(c.cap), c.metadata)) for c in given_children),
        )

    @EXAMPLES
    @given(st.integers(0, 400), st.integers(0, 20), st.binary(max_size=8))
    def test_any_damage(self, start: int, length: int, patch: bytes) -> None:
        """A directory damaged anywhere is read or refused with DirectoryError."""
        data = bytes.fromhex(CASES["immutable"][2]["packed_hex"])
        for unpack in (unpack_immutable, unpack_entries):
            with contextlib.suppress(DirectoryError):
                unpack(data[:start] + patch + data[start + length :])


class ReadWriteDirectoryTests(SynchronousTestCase):
    """What can be read without the write key."""

    def test_recorded_directory(self) -> None:
        """Read caps are the read-only forms of the children; write caps stay encrypted."""
        encrypted = {case["rwcap"]: case["encrypted"] for case in CASES["rwcap_encryption"]}
        for case in CASES["readwrite"]:
            entries = unpack_entries(bytes.fromhex(case["packed_hex"]))
            self.assertEqual(list(entries), sorted(child["name"] for child in case["children"]))
            for child in case["children"]:
                cap = parse_cap(child["cap"])
                assert not isinstance(cap, UnknownCap)
                found = entries[child["name"]]
                self.assertEqual(found.read_cap, cap.readonly())
                self.assertEqual(found.metadata, child["metadata"])
                if child["cap"] in encrypted:
                    self.assertEqual(found.rw_data.hex(), encrypted[child["cap"]])
                else:
                    self.assertGreaterEqual(len(found.rw_data), 48)

    def test_caps_that_promise_too_little(self) -> None:
        """The slot for reading never yields a cap that writes, and one bad child hides no other."""
        for stored, cap in (
            ("", None),
            ("  ", None),
            (CHK + " ", parse_cap(CHK)),
            ("ro." + CHK, parse_cap(CHK)),
            (f"URI:SSK:{KEY_AND_HASH}", UnknownCap(f"ro.URI:SSK:{KEY_AND_HASH}")),
            ("lafs://x", UnknownCap("ro.lafs://x")),
            ("imm.lafs://x", UnknownCap("imm.lafs://x")),
            ("ro.lafs://x", UnknownCap("ro.lafs://x")),
            ("URI:CHK:damaged", UnknownCap("ro.URI:CHK:damaged")),
        ):
            data = entry(cap=stored.encode("ascii"), rw_data=b"secret")
            found = unpack_entries(data)["n"]
            self.assertEqual((found.read_cap, found.rw_data, found.metadata), (cap, b"secret", {}))


class DirectoryCapTests(SynchronousTestCase):
    """Caps of directories."""

    def test_wraps_files_only(self) -> None:
        """A file's cap becomes a directory's; other caps do not."""
        self.assertEqual(str(directory_cap(parse_cap(CHK))), CHK.replace("CHK", "DIR2-CHK"))
        mutable = parse_cap(f"URI:SSK:{KEY_AND_HASH}")
        self.assertEqual(str(directory_cap(mutable)), f"URI:DIR2:{KEY_AND_HASH}")
        refused: tuple[Cap, ...] = (directory_cap(LIT), UnknownCap("x"))
        for cap in refused:
            self.assertRaises(CapError, directory_cap, cap)

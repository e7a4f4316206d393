"""Caps have one spelling each; whatever deviates from it is refused, or unknown."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    is_literal_size,
    parse_cap,
)
from pipegrid.errors import CapError
from tests import vectors

KEY = "yzxcoagbetwet65ltjpbqyli3m"
HASH = "6b7inuiha2xdtgqzd55i6aeggutnxzr6qfwpv2ep5xlln6pgef7a"
CHK = f"URI:CHK:{KEY}:{HASH}:3:10:1234"
CHK_VERIFIER = f"URI:CHK-Verifier:{KEY}:{HASH}:3:10:1234"
SSK = f"URI:SSK:{KEY}:{HASH}"
EXAMPLES = settings(max_examples=300, deadline=None, derandomize=True)

ALL_KINDS = (
    CHK,
    CHK_VERIFIER,
    "URI:LIT:ifsgc",
    *(
        f"URI:{kind}{access}:{KEY}:{HASH}"
        for kind in ("SSK", "MDMF", "DIR2", "DIR2-MDMF")
        for access in ("", "-RO", "-Verifier")
    ),
    CHK.replace("CHK", "DIR2-CHK"),
    CHK_VERIFIER.replace("CHK", "DIR2-CHK"),
    "URI:DIR2-LIT:ifsgc",
)

key_bytes = st.binary(min_size=16, max_size=16)
hash_bytes = st.binary(min_size=32, max_size=32)
counts = st.integers(1, 256).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n)))
file_caps = st.one_of(
    st.builds(LitCap, st.binary(max_size=60)),
    *(
        st.builds(
            lambda secret, ueb_hash, kn, size, cls=cls: cls(secret, ueb_hash, *kn, size),
            key_bytes,
            hash_bytes,
            counts,
            st.integers(1, 1 << 64),
        )
        for cls in (ChkCap, ChkVerifierCap)
    ),
    st.builds(
        MutableCap,
        st.sampled_from(["SSK", "MDMF"]),
        st.sampled_from(["write", "read", "verify"]),
        key_bytes,
        hash_bytes,
    ),
)
known_caps = st.one_of(file_caps, st.builds(DirectoryCap, file_caps))


class CapsTests(SynchronousTestCase):
    """Parsing, spelling and weakening."""

    def test_recorded_derivations(self) -> None:
        """Read-only form, verifier and storage index are the recorded ones."""
        cases = vectors.load("primitives")["caps"]
        for case in cases:
            cap = parse_cap(case["cap"])
            self.assertNotIsInstance(cap, UnknownCap)
            assert not isinstance(cap, UnknownCap)
            self.assertEqual(str(cap), case["canonical"])
            self.assertEqual(str(cap.readonly()), case["readonly"])
            verifier = cap.verifier()
            self.assertEqual(None if verifier is None else str(verifier), case["verify"])
            index = cap.storage_index
            self.assertEqual(None if index is None else base32.encode(index), case["storage_index"])
        self.assertEqual(len(cases), 10)

    def test_recorded_files(self) -> None:
        """The caps of all recorded files are read as what they are."""
        for case in vectors.load("immutable")["cases"]:
            cap = parse_cap(case["cap"])
            self.assertEqual(str(cap), case["cap"])
            if case["format"] == "lit":
                self.assertEqual(cap, LitCap(vectors.plaintext(case["plaintext"])))
                continue
            assert isinstance(cap, ChkCap)
            self.assertEqual(cap.key.hex(), case["key"])
            self.assertEqual((cap.required_shares, cap.total_shares), (case["k"], case["n"]))
            self.assertEqual(cap.size, len(vectors.plaintext(case["plaintext"])))
            self.assertEqual(cap.ueb_hash.hex(), case["ueb_hash"])
            self.assertEqual(base32.encode(cap.storage_index), case["storage_index"])

    def test_every_kind(self) -> None:
        """All kinds are known, and weakening twice is weakening once."""
        for text in ALL_KINDS:
            cap = parse_cap(text)
            assert not isinstance(cap, UnknownCap), text
            self.assertEqual(str(cap), text)
            self.assertEqual(cap.readonly().readonly(), cap.readonly())
            verifier = cap.verifier()
            if verifier is None:
                self.assertIn("LIT", text)
                self.assertIsNone(cap.storage_index)
            else:
                self.assertIn("-Verifier:", str(verifier))
                self.assertEqual(verifier.verifier(), verifier)
                self.assertEqual(verifier.readonly(), verifier)
                self.assertEqual(cap.readonly().verifier(), verifier)
                self.assertEqual(verifier.storage_index, cap.storage_index)

    def test_refuses_other_spellings_of_a_file_cap(self) -> None:
        """Fields missing, added or misspelt are refused, in files and directories alike."""
        bad = [
            f"{KEY}:{HASH}:3:10",
            f"{KEY}:{HASH}:3:10:1234:",
            f"{KEY}:{HASH}:3:10:1234:5",
            f"{KEY}:{HASH}:3:10:",
            f":{HASH}:3:10:1234",
            "",
            KEY,
            f"{KEY.upper()}:{HASH}:3:10:1234",
            f"{KEY}:{HASH.upper()}:3:10:1234",
            f"{KEY[:-1]}n:{HASH}:3:10:1234",
            f"{KEY}:{HASH[:-1]}b:3:10:1234",
            f"{KEY[:-1]}:{HASH}:3:10:1234",
            f"{KEY[:-2]}:{HASH}:3:10:1234",
            f"{KEY}aa:{HASH}:3:10:1234",
            f"{HASH}:{HASH}:3:10:1234",
            f"{KEY}:{KEY}:3:10:1234",
            f"{KEY}======:{HASH}:3:10:1234",
            f"{KEY}:{HASH}:11:10:1234",
            f"{KEY}:{HASH}:0:10:1234",
            f"{KEY}:{HASH}:3:257:1234",
            f"{KEY}:{HASH}:3:0:1234",
            f"{KEY}:{HASH}:3:10:0",
            f" {KEY}:{HASH}:3:10:1234",
            f"{KEY} :{HASH}:3:10:1234",
            f"{KEY}:{HASH}:3:10:1234 ",
            f"{KEY}:{HASH}:3:10:1234\n",
            f"{KEY}:{HASH}:3:10:" + "9" * 5000,
        ]
        for number in (
            "03",
            "+3",
            "-3",
            " 3",
            "3 ",
            "3.0",
            "0x3",
            "1_0",
            "٣",
            "３",
            "³",
            "3e0",
            "",
        ):
            bad.append(f"{KEY}:{HASH}:{number}:10:1234")
            bad.append(f"{KEY}:{HASH}:3:{number}:1234")
            bad.append(f"{KEY}:{HASH}:1:10:{number}")
        for kind in ("CHK", "CHK-Verifier", "DIR2-CHK", "DIR2-CHK-Verifier"):
            for fields in bad:
                with self.assertRaises(CapError, msg=f"{kind} {fields}"):
                    parse_cap(f"URI:{kind}:{fields}")

    def test_a_cap_with_too_few_fields(self) -> None:
        """It is told how many it has, in words that fit the number."""
        for text, has in (
            (f"URI:CHK:{KEY}", "this file cap has 1 field instead of 5"),
            (f"URI:CHK-Verifier:{KEY}:{HASH}", "this verifier cap has 2 fields instead of 5"),
            (f"URI:SSK:{KEY}", "this SSK cap has 1 field instead of 2"),
            (f"URI:DIR2:{KEY}", "this directory cap has 1 field instead of 2"),
            (f"URI:DIR2-CHK:{KEY}", "this directory cap has 1 field instead of 5"),
        ):
            error = self.assertRaises(CapError, parse_cap, text)
            self.assertEqual(str(error), f"{has}; copy it whole")

    def test_refuses_other_spellings_of_a_literal_cap(self) -> None:
        """A literal is one field of strict base32, of any length that base32 has."""
        for fields in ("a", "AA", "ab", "aa=", "aa ", "aa\n", "aa:", "aa:aa", "é", "1"):
            for kind in ("LIT", "DIR2-LIT"):
                with self.assertRaises(CapError, msg=fields):
                    parse_cap(f"URI:{kind}:{fields}")
        self.assertEqual(parse_cap("URI:LIT:"), LitCap(b""))
        long = LitCap(bytes(1000))
        self.assertEqual(long.size, 1000)
        self.assertEqual(parse_cap(str(long)), long)

    def test_refuses_other_spellings_of_a_mutable_cap(self) -> None:
        """Mutable caps are two fields; only MDMF ones may trail old hints, which are dropped."""
        for kind in ("SSK", "SSK-RO", "SSK-Verifier", "MDMF", "MDMF-RO", "DIR2", "DIR2-MDMF"):
            for fields in ("", KEY, f"{KEY[:-1]}n:{HASH}", f"{KEY}:{HASH[:-1]}b", f"{HASH}:{KEY}"):
                with self.assertRaises(CapError, msg=f"{kind} {fields}"):
                    parse_cap(f"URI:{kind}:{fields}")
        for kind in ("SSK", "SSK-RO", "DIR2", "DIR2-Verifier"):
            self.assertRaises(CapError, parse_cap, f"URI:{kind}:{KEY}:{HASH}:3:131073")
        for kind in ("MDMF-RO", "DIR2-MDMF"):
            for hints in (":3:131073", ":", ":x y:"):
                cap = parse_cap(f"URI:{kind}:{KEY}:{HASH}{hints}")
                self.assertEqual(str(cap), f"URI:{kind}:{KEY}:{HASH}")

    def test_unknown_kinds_are_kept(self) -> None:
        """What starts like no known cap is kept as it is."""
        for text in (
            "",
            "x",
            "URI",
            "URI:",
            "URI:CHK",
            "URI:CHK2:x",
            "URI:chk:x",
            f" {CHK}",
            CHK.lower(),
            "uri:LIT:",
            "lafs://from_the_future",
            "URI:DIR2-SSK:x",
            "ro.x",
            "imm.",
        ):
            self.assertEqual(parse_cap(text), UnknownCap(text))
            self.assertEqual(str(parse_cap(text)), text)

    def test_promises_that_are_kept(self) -> None:
        """A prefix comes off where the cap does what it promises."""
        for text in (CHK, CHK_VERIFIER, "URI:LIT:ifsgc", CHK.replace("CHK", "DIR2-CHK")):
            self.assertEqual(parse_cap(f"imm.{text}"), parse_cap(text))
            self.assertEqual(parse_cap(f"ro.{text}"), parse_cap(text))
        for kind in ("SSK-RO", "SSK-Verifier", "MDMF-RO", "DIR2-RO", "DIR2-MDMF-Verifier"):
            text = f"URI:{kind}:{KEY}:{HASH}"
            self.assertEqual(parse_cap(f"ro.{text}"), parse_cap(text))

    def test_promises_that_are_broken(self) -> None:
        """A cap that can do more than its prefix promises is unusable."""
        broken = [f"ro.URI:{kind}:{KEY}:{HASH}" for kind in ("SSK", "MDMF", "DIR2", "DIR2-MDMF")]
        broken += [
            f"imm.URI:{kind}:{KEY}:{HASH}" for kind in ("SSK", "SSK-RO", "SSK-Verifier", "DIR2-RO")
        ]
        # One prefix is all that a cap may have.
        broken += [f"ro.imm.{CHK}", f"imm.ro.{CHK}", f"imm.imm.{CHK}", "ro." * 100_000 + CHK]
        for text in broken:
            self.assertEqual(parse_cap(text), UnknownCap(text))

    def test_a_prefix_does_not_excuse_damage(self) -> None:
        """A damaged cap of a known kind is refused with a prefix as it is without."""
        for prefix in ("ro.", "imm."):
            self.assertRaises(CapError, parse_cap, f"{prefix}{CHK}:")

    def test_secrets_stay_out_of_sight(self) -> None:
        """Neither repr nor an error shows what would let its reader read the file."""
        for text in (CHK, SSK, CHK.replace("CHK", "DIR2-CHK"), f"imm.{SSK}", "URI:LIT:ifsgc"):
            secret = str(parse_cap(text))
            self.assertNotIn(KEY, repr(parse_cap(text)))
            self.assertNotIn(secret, repr(parse_cap(text)))
        error = self.assertRaises(CapError, parse_cap, f"URI:CHK:{KEY}:{HASH}:{KEY}:3:10")
        self.assertNotIn(KEY, str(error))

    def test_literal_sizes(self) -> None:
        """Up to 55 bytes a file lives in its cap."""
        self.assertEqual([is_literal_size(n) for n in (0, 55, 56)], [True, True, False])

    @EXAMPLES
    @given(known_caps)
    def test_round_trip(self, cap: Cap) -> None:
        """Every cap is read back from its text."""
        self.assertEqual(parse_cap(str(cap)), cap)

    @EXAMPLES
    @given(
        st.sampled_from(["", "ro.", "imm.", "URI:", "URI:CHK:", "imm.URI:LIT:", "URI:DIR2-MDMF:"]),
        st.text(max_size=40),
    )
    def test_any_text(self, start: str, rest: str) -> None:
        """Any text is a cap, unknown, or refused with CapError; what is known has one spelling."""
        try:
            cap = parse_cap(start + rest)
        except CapError:
            return
        self.assertEqual(parse_cap(str(cap)), cap)

    @EXAMPLES
    @given(st.sampled_from(ALL_KINDS), st.integers(0, 130), st.integers(0, 3), st.text(max_size=3))
    def test_any_damage(self, text: str, start: int, length: int, patch: str) -> None:
        """A damaged cap never raises anything but CapError, and never has a second spelling."""
        damaged = text[:start] + patch + text[start + length :]
        try:
            cap = parse_cap(damaged)
        except CapError:
            return
        prefix_free = damaged.removeprefix("ro.").removeprefix("imm.")
        self.assertTrue("MDMF" in damaged or str(cap) in (damaged, prefix_free))

"""Tagged hashes agree with the recorded ones, at once and piece by piece."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32, hashes
from tests import vectors

PRIMITIVES = vectors.load("primitives")


class HashesTests(SynchronousTestCase):
    """The hashes of the format."""

    def test_netstring(self) -> None:
        """A netstring counts bytes in plain decimal."""
        self.assertEqual(hashes.netstring(b""), b"0:,")
        self.assertEqual(hashes.netstring(b"0123456789"), b"10:0123456789,")

    def test_recorded_tagged_hashes(self) -> None:
        """Every tag of the format gives the recorded hashes."""
        for case in PRIMITIVES["tagged_hash"]:
            tag, value = case["tag"].encode("ascii"), bytes.fromhex(case["value"])
            length = case.get("truncate", hashes.HASH_BYTES)
            result = hashes.tagged_hash(tag, value)[:length]
            self.assertEqual(result.hex(), case["hash"], case["tag"])
        self.assertEqual(len(PRIMITIVES["tagged_hash"]), 76)

    def test_recorded_pair_hashes(self) -> None:
        """Pairs are hashed as two netstrings."""
        for case in PRIMITIVES["tagged_pair_hash"]:
            left, right = bytes.fromhex(case["a"]), bytes.fromhex(case["b"])
            result = hashes.Tag(case["tag"].encode("ascii")).hash_pair(left, right)
            self.assertEqual(result.hex(), case["hash"])
        self.assertEqual(len(PRIMITIVES["tagged_pair_hash"]), 9)

    def test_recorded_derived_hashes(self) -> None:
        """The named hashes use the tags that they should."""
        expected = dict(PRIMITIVES["derived"])
        hello = b"hello world"
        self.assertEqual(
            {
                "storage_index(key=000102..0f)": hashes.storage_index(bytes(range(16))).hex(),
                "block_hash('hello world')": hashes.BLOCK.hash(hello).hex(),
                "crypttext_hash('hello world')": hashes.CRYPTTEXT.hash(hello).hex(),
                "crypttext_segment_hash('hello world')": hashes.CRYPTTEXT_SEGMENT.hash(hello).hex(),
                "uri_extension_hash('hello world')": hashes.UEB.hash(hello).hex(),
            },
            expected,
        )

    def test_recorded_convergent_keys(self) -> None:
        """The convergent key depends on secret, counts, rounded segment size and content."""
        for case in PRIMITIVES["convergence_key"]:
            hasher = hashes.convergent_key_hasher(
                bytes.fromhex(case["convergence"]), case["k"], case["n"], case["segment_size"]
            )
            hasher.update(bytes.fromhex(case["data"]))
            self.assertEqual(hasher.digest()[: hashes.KEY_BYTES].hex(), case["key"])
        self.assertEqual(len(PRIMITIVES["convergence_key"]), 4)

    def test_keys_and_indexes_of_files(self) -> None:
        """The recorded files get their recorded keys and storage indexes."""
        checked = 0
        for case in vectors.load("immutable")["cases"]:
            if case["format"] == "lit":
                continue
            key = bytes.fromhex(case["key"])
            self.assertEqual(base32.encode(hashes.storage_index(key)), case["storage_index"])
            if case["convergence"] is not None:
                hasher = hashes.convergent_key_hasher(
                    bytes.fromhex(case["convergence"]), case["k"], case["n"], case["segment_size"]
                )
                hasher.update(vectors.plaintext(case["plaintext"]))
                self.assertEqual(hasher.digest()[:16], key, case["name"])
                checked += 1
        self.assertGreater(checked, 30)

    @settings(max_examples=50, deadline=None, derandomize=True)
    @given(st.lists(st.binary(max_size=100), max_size=6))
    def test_pieces_are_as_good_as_the_whole(self, pieces: list[bytes]) -> None:
        """However a value is cut, of whatever kind of buffer, the hash is the same."""
        tag = hashes.Tag(b"tag")
        whole = tag.hash(b"".join(pieces))
        self.assertEqual(tag.hash_pieces(memoryview(piece) for piece in pieces), whole)
        hasher = tag.hasher()
        for piece in pieces:
            hasher.update(bytearray(piece))
        self.assertEqual(hasher.digest(), whole)
        self.assertEqual(hasher.digest(), whole)
        self.assertEqual(hashes.tagged_hash(b"tag", b"".join(pieces)), whole)

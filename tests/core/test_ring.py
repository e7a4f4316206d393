"""Servers stand on every file's ring where all other clients see them, too."""

from __future__ import annotations

import hashlib

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32, placement
from tests import vectors


class PermutedTests(SynchronousTestCase):
    """The order of servers for a file."""

    def test_recorded_orders(self) -> None:
        """The recorded orders are found again, however the servers are listed."""
        cases = vectors.load("primitives")["permuted_order"]
        for case in cases:
            index = bytes.fromhex(case["storage_index"])
            seeds = {name: bytes.fromhex(seed) for name, seed in case["seeds"].items()}
            order = placement.permuted(index, seeds)
            self.assertEqual(order, case["order"])
            first = hashlib.sha1(index + seeds[order[0]]).hexdigest()
            self.assertEqual(first, case["hash_of_first"])
            backwards = {name: seeds[name] for name in reversed(seeds)}
            self.assertEqual(placement.permuted(index, backwards), order)
        self.assertEqual(len(cases), 4)

    def test_preferred_servers_come_first(self) -> None:
        """Preferred servers lead; both groups keep the ring's order; absent ones do not matter."""
        case = vectors.load("primitives")["permuted_order"][0]
        index = bytes.fromhex(case["storage_index"])
        seeds = {name: bytes.fromhex(seed) for name, seed in case["seeds"].items()}
        order = case["order"]
        preferred = {order[3], order[9], "absent"}
        expected = [order[3], order[9], *(name for name in order if name not in preferred)]
        self.assertEqual(placement.permuted(index, seeds, preferred), expected)

    def test_equal_seeds_and_no_servers(self) -> None:
        """Servers with one seed keep the order in which they are listed."""
        self.assertEqual(placement.permuted(b"i" * 16, {}), [])
        for names in ("xyz", "zyx"):
            self.assertEqual(placement.permuted(b"i" * 16, dict.fromkeys(names, b"s")), list(names))


class PermutationSeedTests(SynchronousTestCase):
    """Where the seed of a server comes from."""

    def test_announced(self) -> None:
        """An announced seed counts before all else, whatever its length."""
        for seed in (bytes(range(32)), bytes(range(20))):
            announced = base32.encode(seed)
            self.assertEqual(placement.permutation_seed("v0-" + "a" * 52, announced), seed)
        self.assertRaises(ValueError, placement.permutation_seed, "v0-x", "NOT BASE32")

    def test_from_a_public_key(self) -> None:
        """Without one, the public key in the server's id is the seed."""
        key = bytes(range(32))
        for nothing in (None, ""):
            self.assertEqual(placement.permutation_seed(f"v0-{base32.encode(key)}", nothing), key)

    def test_from_any_other_id(self) -> None:
        """All other ids are hashed."""
        key = base32.encode(bytes(range(32)))
        for server_id in (
            "",
            "storage é",
            key,
            f"v1-{key}",
            f"v0-{key}a",
            f"v0-{key[:-1]}b",
            "v0-",
        ):
            expected = hashlib.sha256(server_id.encode("utf-8")).digest()
            self.assertEqual(placement.permutation_seed(server_id), expected)

"""Merkle trees and share hash chains agree with the recorded ones."""

from __future__ import annotations

import hashlib

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import hash_tree
from pipegrid.core.hashes import MERKLE_NODE
from tests import vectors

PRIMITIVES = vectors.load("primitives")


def leaves(count: int) -> list[bytes]:
    """Return the leaves that the recorded trees were built over."""
    return [hashlib.sha256(b"leaf %d" % i).digest() for i in range(count)]


class HashTreeTests(SynchronousTestCase):
    """Stored trees."""

    def test_recorded_trees(self) -> None:
        """Roots, nodes and sizes are the recorded ones, from 1 leaf to 256."""
        for case in PRIMITIVES["hash_trees"]:
            count = case["num_leaves"]
            tree = hash_tree.build(leaves(count))
            self.assertEqual(hash_tree.num_nodes(count), case["size"])
            self.assertEqual(len(tree), 32 * case["size"])
            self.assertEqual(hash_tree.root(tree).hex(), case["root"])
            self.assertEqual(hashlib.sha256(tree).hexdigest(), case["all_nodes_sha256"])
            for number, node in enumerate(case.get("nodes", ())):
                self.assertEqual(hash_tree.node(tree, number).hex(), node)
        self.assertEqual(len(PRIMITIVES["hash_trees"]), 17)

    def test_recorded_chain_orders(self) -> None:
        """The chain of every leaf is stored in the recorded order."""
        for case in PRIMITIVES["hash_trees"]:
            count = case["num_leaves"]
            for leaf, order in case["chain_order_with_leaf"].items():
                self.assertEqual(
                    list(hash_tree.chain_order(count, int(leaf))), order, (count, leaf)
                )
                self.assertEqual(len(order), hash_tree.chain_entries(count))

    def test_recorded_padding_leaves(self) -> None:
        """Leaves past the last one are hashes of their number."""
        for leaf, digest in PRIMITIVES["empty_leaf_hash"].items():
            self.assertEqual(hash_tree.empty_leaf(int(leaf)).hex(), digest)

    def test_no_leaves_at_all(self) -> None:
        """The tree over nothing is padding leaf 0 alone."""
        self.assertEqual(hash_tree.build([]), hash_tree.empty_leaf(0))
        self.assertEqual(hash_tree.num_nodes(0), 1)

    def test_sibling_path_gives_the_root(self) -> None:
        """A leaf and its sibling path, combined bottom-up, are the root."""
        for count in (1, 2, 3, 7, 8, 9, 33):
            tree = hash_tree.build(leaves(count))
            for leaf in range(count):
                number = hash_tree.leaf_node(count, leaf)
                value = hash_tree.node(tree, number)
                self.assertEqual(value, leaves(count)[leaf])
                for sibling in hash_tree.sibling_path(count, leaf):
                    pair = (value, hash_tree.node(tree, sibling))
                    value = MERKLE_NODE.hash_pair(*(pair if sibling > number else pair[::-1]))
                    number = (number - 1) // 2
                self.assertEqual(value, hash_tree.root(tree), (count, leaf))

    def test_entries_by_share_count(self) -> None:
        """The chain grows by one entry with each doubling of the shares."""
        for entries, most in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 256), 1):
            self.assertEqual(hash_tree.chain_entries(most), entries)
            if most > 2:
                self.assertEqual(hash_tree.chain_entries(most // 2 + 1), entries)

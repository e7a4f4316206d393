"""A tree of which only the root is trusted."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import hash_tree
from pipegrid.core.hash_tree import GROUP_LEAVES, BadNode, VerifiedTree, group_end, nodes_to_read


def leaves_of(count: int) -> list[bytes]:
    """Return leaves that differ."""
    return [hashlib.sha256(b"%d" % i).digest() for i in range(count)]


def filled(stored: bytes, count: int, root: bytes) -> VerifiedTree:
    """Return a tree that was offered all of stored."""
    tree = VerifiedTree(count, root)
    tree.offer(0, stored)
    return tree


def bad_pair(tree: VerifiedTree, leaf: int) -> int | None:
    """Return the bad pair on the path of a leaf, if there is one."""
    try:
        tree.leaf(leaf)
    except BadNode as error:
        return error.node
    return None


class VerifiedTreeTests(SynchronousTestCase):
    """Proving leaves."""

    def test_every_leaf_of_a_good_tree_is_proven(self) -> None:
        """Whatever the number of leaves, each is found, and so is the padding."""
        for count in (*range(1, 18), 300):
            leaves = leaves_of(count)
            stored = hash_tree.build(leaves)
            tree = filled(stored, count, stored[:32])
            self.assertEqual([tree.leaf(i) for i in range(count)], leaves)
            if hash_tree.padded_leaves(count) > count:
                self.assertEqual(tree.leaf(count), hash_tree.empty_leaf(count))

    def test_missing_nodes_are_waited_for(self) -> None:
        """Without its whole path a leaf is not known; with it, it is."""
        leaves = leaves_of(8)
        stored = hash_tree.build(leaves)
        tree = VerifiedTree(8, stored[:32])
        tree.offer(11, stored[11 * 32 : 13 * 32])
        tree.offer(5, stored[5 * 32 : 7 * 32])
        self.assertIsNone(tree.leaf(4))
        tree.offer(1, stored[32:96])
        self.assertEqual(tree.leaf(4), leaves[4])
        self.assertIsNone(tree.leaf(0))

    def test_the_root_cannot_be_replaced(self) -> None:
        """A stored tree that is sound but has another root proves nothing."""
        tree = filled(hash_tree.build(leaves_of(8)), 8, bytes(32))
        self.assertRaises(BadNode, tree.leaf, 3)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.integers(2, 40), st.data())
    def test_a_bad_node_is_found_where_it_stands(self, count: int, data: st.DataObject) -> None:
        """Reading all leaves finds any changed node but the root, and names its pair."""
        stored = bytearray(hash_tree.build(leaves_of(count)))
        root = bytes(stored[:32])
        bad = data.draw(st.integers(1, len(stored) // 32 - 1))
        stored[bad * 32 + data.draw(st.integers(0, 31))] ^= 1 << data.draw(st.integers(0, 7))
        tree = filled(bytes(stored), count, root)
        found = {bad_pair(tree, leaf) for leaf in range(hash_tree.padded_leaves(count))}
        self.assertIn(bad - 1 + (bad & 1), found)

    def test_proven_nodes_stay(self) -> None:
        """Nodes that come later do not replace what is proven."""
        leaves = leaves_of(4)
        stored = hash_tree.build(leaves)
        tree = filled(stored, 4, stored[:32])
        tree.leaf(0)
        tree.offer(3, bytes(32))
        self.assertEqual(tree.leaf(0), leaves[0])

    def test_a_large_tree_is_read_in_groups_and_forgotten(self) -> None:
        """Of a large tree each group of leaves can be proven alone, and leaves nothing behind."""
        count = 5 * GROUP_LEAVES
        leaves = leaves_of(count)
        stored = hash_tree.build(leaves)
        tree = VerifiedTree(count, stored[:32])
        most = 0
        for first in range(0, count, GROUP_LEAVES):
            end = group_end(count, first)
            tree.forget_before(first)
            for a, b in nodes_to_read(count, first, end):
                tree.offer(a, stored[a * 32 : b * 32])
            self.assertEqual([tree.leaf(i) for i in range(first, end)], leaves[first:end])
            most = max(most, len(tree._pages))
        self.assertLess(most * 128, 4 * GROUP_LEAVES)

    def test_a_huge_tree_costs_what_is_read(self) -> None:
        """A tree over a trillion leaves takes no room."""
        tree = VerifiedTree(10**12, bytes(32))
        self.assertIsNone(tree.leaf(10**11))
        self.assertLess(sum(b - a for a, b in nodes_to_read(10**12, 5, 6)), 100)

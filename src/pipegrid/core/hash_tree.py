"""
Merkle trees as shares store them (one byte string of 32-byte nodes, root first), and trees that are verified
node by node.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pipegrid.core.hashes import HASH_BYTES, MERKLE_EMPTY_LEAF, MERKLE_NODE, Buffer

# Node 0 is the root; the children of node i are 2i+1 and 2i+2. A tree over m leaves is padded to the next
# power of two. Each padding leaf is a hash of its own number.


def padded_leaves(num_leaves: int) -> int:
    """Return the smallest power of two that is >= num_leaves; 1 for 0 leaves."""
    return 1 << max(0, num_leaves - 1).bit_length()


def num_nodes(num_leaves: int) -> int:
    """Return the number of nodes in the stored tree; each takes 32 bytes."""
    return 2 * padded_leaves(num_leaves) - 1


def leaf_node(num_leaves: int, leaf: int) -> int:
    """Return the node number of a leaf."""
    return padded_leaves(num_leaves) - 1 + leaf


@lru_cache(maxsize=4096)
def empty_leaf(leaf: int) -> bytes:
    """Return the hash that pads the tree at a leaf number after the last leaf."""
    return MERKLE_EMPTY_LEAF.hash(b"%d" % leaf)


@lru_cache(maxsize=64)
def empty_nodes(num_leaves: int) -> tuple[tuple[bytes, ...], ...]:
    """
    Return the hashes of padding leaves and of the nodes above only padding leaves, level by level from the
    leaves to the root.

    They are the same in every tree over ``num_leaves`` leaves, and the last nodes of their levels.
    """
    width = padded_leaves(num_leaves)
    level = tuple(empty_leaf(i) for i in range(num_leaves, width))
    levels = [level]
    while width > 1:
        width //= 2
        level = tuple(
            MERKLE_NODE.hash_pair(level[i], level[i + 1])
            for i in range(len(level) % 2, len(level), 2)
        )
        levels.append(level)
    return tuple(levels)


def build(leaves: Sequence[bytes]) -> bytes:
    """
    Return the stored form of the tree over leaves: 32 * num_nodes(len(leaves)) bytes.

    Args:
        leaves: 32-byte hashes.
    """
    empty = empty_nodes(len(leaves))
    level = [*leaves, *empty[0]]
    levels = [level]
    pair = MERKLE_NODE.hash_pair
    for known in empty[1:]:
        unknown = len(level) - 2 * len(known)
        level = [pair(level[i], level[i + 1]) for i in range(0, unknown, 2)]
        level += known
        levels.append(level)
    return b"".join(node for level in reversed(levels) for node in level)


def root(tree: bytes) -> bytes:
    """Return node 0 of a stored tree."""
    return tree[:HASH_BYTES]


def node(tree: bytes, number: int) -> bytes:
    """Return one node of a stored tree."""
    return tree[number * HASH_BYTES : (number + 1) * HASH_BYTES]


@lru_cache(maxsize=1024)
def sibling_path(num_leaves: int, leaf: int) -> tuple[int, ...]:
    """
    Return the siblings of the nodes on the path from a leaf to the root, from the leaf's sibling upwards.

    The root can be computed from these nodes and the leaf.
    """
    number = leaf_node(num_leaves, leaf)
    path = []
    while number:
        path.append(number + 1 if number & 1 else number - 1)
        number = (number - 1) // 2
    return tuple(path)


@lru_cache(maxsize=1024)
def chain_order(num_leaves: int, leaf: int) -> tuple[int, ...]:
    """
    Return the node numbers of a share hash chain (sibling path and leaf) in the order in which a share stores
    them.

    Readers accept any order. Writers reproduce the iteration order of a small open-addressing set of
    integers; otherwise shares would not be identical bit for bit.
    """
    slots: list[int | None] = [None] * 8
    for count, number in enumerate(
        (*sibling_path(num_leaves, leaf), leaf_node(num_leaves, leaf)), 1
    ):
        _place(slots, number)
        if 5 * count >= 3 * (len(slots) - 1):
            wider: list[int | None] = [None] * max(8, 1 << (4 * count).bit_length())
            for present in slots:
                if present is not None:
                    _place(wider, present)
            slots = wider
    return tuple(number for number in slots if number is not None)


def _place(slots: list[int | None], number: int) -> None:
    mask = len(slots) - 1
    i = number & mask
    perturb = number
    while True:
        run = 9 if i + 9 <= mask else 0
        for slot in range(i, i + run + 1):
            if slots[slot] is None:
                slots[slot] = number
                return
        perturb >>= 5
        i = (5 * i + 1 + perturb) & mask


def chain_entries(num_leaves: int) -> int:
    """Return how many entries a share hash chain has: log2 of the padded number of leaves, plus one."""
    return padded_leaves(num_leaves).bit_length()


WHOLE_TREE_BYTES = 1 << 16
"""A stored tree of at most this size is read as a whole. Of a larger tree, only the needed nodes are read."""

_SMALL_LEAVES = 1 << ((WHOLE_TREE_BYTES // HASH_BYTES + 1) // 2).bit_length() - 1
"""Maximum number of leaves of a tree that is read as a whole: m leaves, a power of two, have 2m - 1 nodes."""

GROUP_LEAVES = 1024
"""The nodes of larger trees are read for this many leaves at a time, about 64 KiB of nodes."""

_PAGE_NODES = 128
_STORED, _PROVEN = 1, 2


class BadNode(Exception):
    """
    Two sibling nodes do not hash to their verified parent.

    Attributes:
        node: the number of the left sibling.
    """

    def __init__(self, node: int) -> None:
        super().__init__(f"tree nodes {node} and {node + 1} do not match their parent")
        self.node = node


class _Page:
    __slots__ = ("hashes", "states")

    def __init__(self) -> None:
        self.hashes = bytearray(_PAGE_NODES * HASH_BYTES)
        self.states = bytearray(_PAGE_NODES)


class VerifiedTree:
    """
    A tree over at least one leaf whose node 0 must be ``root``; nodes are verified when they are needed.

    To verify a leaf, the unverified pairs on its path are hashed from the root downwards. So a bad node is
    located exactly, and reading all leaves in order costs about one hash per leaf. Pages of nodes exist only
    where nodes were stored, so memory is proportional to what was read, even for a billion leaves.
    """

    def __init__(self, num_leaves: int, root: bytes) -> None:
        self.num_leaves = num_leaves
        self._num_nodes = num_nodes(num_leaves)
        self._depth = padded_leaves(num_leaves).bit_length() - 1
        self._pages: dict[int, _Page] = {}
        self._store(0, root, _PROVEN)

    def offer(self, first_node: int, data: Buffer) -> None:
        """
        Store unverified nodes from ``first_node`` on; nodes that are verified already do not change.

        Args:
            data: whole nodes, all of them within the tree.
        """
        view = memoryview(data).cast("B")
        count, rest = divmod(len(view), HASH_BYTES)
        assert not rest, "a part of a node"
        assert first_node >= 0, "a node before the root"
        assert first_node + count <= self._num_nodes, "nodes outside the tree"
        for i in range(count):
            if self._state(first_node + i) != _PROVEN:
                self._store(first_node + i, view[i * HASH_BYTES : (i + 1) * HASH_BYTES], _STORED)

    def leaf(self, leaf: int) -> bytes | None:
        """
        Return the verified hash of a leaf, or None while nodes on its path are missing.

        Args:
            leaf: at least 0, and less than the padded number of leaves.

        Raises:
            BadNode: stored nodes contradict the root.
        """
        number = leaf_node(self.num_leaves, leaf)
        unproven = []
        while self._state(number) != _PROVEN:
            left = number - 1 + (number & 1)
            if not self._state(left) or not self._state(left + 1):
                return None
            unproven.append(left)
            number = (number - 1) // 2
        for left in reversed(unproven):
            pair = MERKLE_NODE.hash_pair(self._hash(left), self._hash(left + 1))
            if pair != self._hash((left - 1) // 2):
                raise BadNode(left)
            self._mark_proven(left)
            self._mark_proven(left + 1)
        return self._hash(leaf_node(self.num_leaves, leaf))

    def proven(self, number: int) -> bytes | None:
        """
        Return a node if it is verified, else None. Verified are the nodes on the paths of verified leaves,
        and their siblings.
        """
        return self._hash(number) if self._state(number) == _PROVEN else None

    def forget_before(self, leaf: int) -> None:
        """Drop the nodes that are needed only for leaves before ``leaf``."""
        for index in list(self._pages):
            first, last = index * _PAGE_NODES, (index + 1) * _PAGE_NODES - 1
            level = (last + 1).bit_length() - 1
            if (first + 1).bit_length() - 1 != level or level > self._depth:
                continue  # the page has nodes of several levels, near the root
            oldest = (1 << level) - 1 + (leaf >> (self._depth - level) & ~1)
            if last < oldest:
                del self._pages[index]

    def _state(self, number: int) -> int:
        page = self._pages.get(number // _PAGE_NODES)
        return page.states[number % _PAGE_NODES] if page else 0

    def _hash(self, number: int) -> bytes:
        at = number % _PAGE_NODES * HASH_BYTES
        return bytes(self._pages[number // _PAGE_NODES].hashes[at : at + HASH_BYTES])

    def _store(self, number: int, value: Buffer, state: int) -> None:
        page = self._pages.get(number // _PAGE_NODES)
        if page is None:
            page = self._pages[number // _PAGE_NODES] = _Page()
        at = number % _PAGE_NODES
        page.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] = value
        page.states[at] = state

    def _mark_proven(self, number: int) -> None:
        self._pages[number // _PAGE_NODES].states[number % _PAGE_NODES] = _PROVEN


def is_small(num_leaves: int) -> bool:
    """Return whether a stored tree is small enough to be read as a whole."""
    return num_leaves <= _SMALL_LEAVES


def group_end(num_leaves: int, leaf: int) -> int:
    """Return the end of the group of leaves whose nodes are read together with the nodes of ``leaf``."""
    if is_small(num_leaves):
        return num_leaves
    return min((leaf // GROUP_LEAVES + 1) * GROUP_LEAVES, num_leaves)


def nodes_to_read(num_leaves: int, first_leaf: int, end_leaf: int) -> list[tuple[int, int]]:
    """
    Return the ranges [first, end) of nodes with which leaves [first_leaf, end_leaf) can be verified.

    The ranges are ordered by level, from the top; they never include the root. A small tree is one range.
    """
    if is_small(num_leaves):
        total = num_nodes(num_leaves)
        return [(1, total)] if total > 1 else []
    depth = padded_leaves(num_leaves).bit_length() - 1
    ranges = []
    for level in range(1, depth + 1):
        up = depth - level
        base = (1 << level) - 1
        ranges.append((base + ((first_leaf >> up) & ~1), base + (((end_leaf - 1) >> up) | 1) + 1))
    return ranges

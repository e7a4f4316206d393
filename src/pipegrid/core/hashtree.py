"""
Merkle trees as shares store them: one byte string of 32-byte nodes, root first.

Node 0 is the root, the children of node i are 2i+1 and 2i+2. A tree over m leaves is padded to
the next power of two with leaves that are hashes of their own number. Checking nodes against a
known root is ``VerifiedTree``'s work, in ``verifiedtree``.

Source: the format reference, sections 1.5 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from pipegrid.core.hashes import HASH_BYTES, MERKLE_EMPTY_LEAF, MERKLE_NODE


def padded_leaves(num_leaves: int) -> int:
    """Return the smallest power of two that is >= num_leaves (1 for 0)."""
    return 1 << max(0, num_leaves - 1).bit_length()


def num_nodes(num_leaves: int) -> int:
    """Return how many nodes the stored tree has; it takes 32 times as many bytes."""
    return 2 * padded_leaves(num_leaves) - 1


def leaf_node(num_leaves: int, leaf: int) -> int:
    """Return the node number of a leaf."""
    return padded_leaves(num_leaves) - 1 + leaf


@lru_cache(maxsize=4096)
def empty_leaf(leaf: int) -> bytes:
    """Return the hash that stands for a leaf number past the last one."""
    return MERKLE_EMPTY_LEAF.hash(b"%d" % leaf)


@lru_cache(maxsize=64)
def empty_nodes(num_leaves: int) -> tuple[tuple[bytes, ...], ...]:
    """
    Return the nodes that no leaf has a part in, level by level from the leaves to the root.

    They are the same in every tree over so many leaves, and the last ones of their levels.
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


def sibling_path(num_leaves: int, leaf: int) -> Iterator[int]:
    """Yield the node numbers, bottom-up, that together with the leaf give the root."""
    number = leaf_node(num_leaves, leaf)
    while number:
        yield number + 1 if number & 1 else number - 1
        number = (number - 1) // 2


@lru_cache(maxsize=1024)
def chain_order(num_leaves: int, leaf: int) -> tuple[int, ...]:
    """
    Return the node numbers of a share hash chain (sibling path and leaf) in their stored order.

    Readers take any order; writers reproduce the one that a small open-addressing set of
    integers happens to iterate in, since that is what bit-identical shares need.
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
    """Return how many entries a share hash chain has: log2 of the padded leaves, plus one."""
    return padded_leaves(num_leaves).bit_length()

"""
Placement: the permuted ring, servers of happiness, and which server gets which share.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import TypeVar

from pipegrid.core import base32

# ``place_shares`` guarantees, in this order:
#
# 1. Every share is assigned to exactly one server: one that holds it already, or a writable one.
# 2. No other assignment with property 1 reaches a higher happiness, whether or not existing shares that are
#    assigned to other servers are counted.
# 3. Among the assignments with properties 1 and 2, none sends fewer shares.
# 4. The same arguments give the same result. If no server holds a share, share i goes to the i-th writable
#    server, modulo the number of writable servers; otherwise the result stays near to that, since readers
#    look there first.
#
# Why 2 and 3 hold: Take a maximum matching of the existing shares, in which as many read-only servers as
# possible take part; let it have m pairs and leave w writable servers unused. (Adding servers one by one
# along augmenting paths never drops a server that takes part, so read-only servers come first and both maxima
# are reached together.) The u shares that no server holds must be sent anyway; each goes to an unused server
# while there are any. If unused servers remain, as many shares that are held, but not matched, are sent to
# them too: each adds one to the happiness, and nothing can add more. So max(u, min(n - m, w)) shares are
# sent. Fewer are not enough, since happiness is at most m plus the number of shares sent.
#
# An upload that has begun counts shares in flight as held by the servers that they are sent to. After a
# server has failed, the same function then gives the new placement, and only shares whose server has changed
# are sent.

T = TypeVar("T")


def servers_of_happiness(sharemap: Mapping[int, AbstractSet[T]]) -> int:
    """Return the happiness of a map from share numbers to the servers that hold them."""
    alone = {next(iter(servers)) for servers in sharemap.values() if len(servers) == 1}
    if len(alone) == len(sharemap):
        return len(alone)  # each share is on a different server, the usual case
    return len(happiness_matching(sharemap))


def possible_happiness(
    sharemap: Mapping[int, AbstractSet[T]],
    takers: Collection[T],
    total_shares: int,
    barred: Collection[tuple[int, T]] = (),
) -> int:
    """
    Return the happiness that is possible if any share can be made again and sent to servers.

    Args:
        sharemap: for each share number, the servers that hold the share now.
        takers: servers that accept shares, including those that hold some already.
        total_shares: n; the shares are 0 to n - 1.
        barred: pairs of a share and a server that does not accept this share.
    """
    reached = servers_of_happiness(sharemap)
    if reached == total_shares:
        return reached
    every = (1 << total_shares) - 1
    holdings: dict[T, int] = dict.fromkeys(takers, every)
    for number, server in barred:
        if server in holdings:
            holdings[server] &= ~(1 << number)
    for number, servers in sharemap.items():
        for server in servers:
            holdings[server] = holdings.get(server, 0) | 1 << number
    return len(_maximum_matching(list(holdings.values())))


def happiness_matching(sharemap: Mapping[int, AbstractSet[T]]) -> dict[int, T]:
    """
    Return a maximum matching, from share number to server. If there are several, any of them is returned.

    The time is proportional to the size of the map, plus the square of the number of shares.
    """
    shares = list(sharemap)
    holdings: dict[T, int] = {}
    for position, share in enumerate(shares):
        for server in sharemap[share]:
            holdings[server] = holdings.get(server, 0) | 1 << position
    servers = list(holdings)
    matching = _maximum_matching(list(holdings.values()))
    return {shares[position]: servers[index] for position, index in matching.items()}


def place_shares(
    readwrite: Sequence[T],
    readonly: Sequence[T],
    existing: Mapping[T, Collection[int]],
    total_shares: int,
) -> dict[int, T]:
    """
    Return the server for each share number; a comment in this module lists the guarantees.

    Args:
        readwrite: servers that can accept shares, in the order of the ring.
        readonly: servers that accept no shares, but whose existing shares count; in the order of the ring.
        existing: for each server, the share numbers that it holds, or soon will. Servers that are in neither
            list and share numbers from ``total_shares`` on are ignored.
        total_shares: n; the shares are 0 to n - 1.

    Returns:
        In ascending order of share numbers. If no server is writable, shares that no server holds are left
            out.
    """
    writable = dict.fromkeys(readwrite)
    servers = [*dict.fromkeys(s for s in readonly if s not in writable), *writable]
    holdings = [_mask(existing.get(server, ()), total_shares) for server in servers]
    placement = {share: servers[index] for share, index in _maximum_matching(holdings).items()}
    load = Counter(placement.values())
    unused = [server for server in writable if server not in load]

    held = _union(holdings)
    unplaced = list(_bits(~held & (1 << total_shares) - 1))
    unmatched = [share for share in _bits(held) if share not in placement]
    moving = max(0, len(unused) - len(unplaced))
    for share in unmatched[moving:]:
        holders = [
            server for server, mask in zip(servers, holdings, strict=True) if mask >> share & 1
        ]
        _put(share, holders, placement, load)
    unplaced = sorted(unplaced + unmatched[:moving])

    _spread(unplaced, list(writable), unused, placement, load)
    for share in unplaced:
        if share not in placement and writable:
            _put(share, writable, placement, load)
    return dict(sorted(placement.items()))


def _spread(
    unplaced: Sequence[int],
    writable: Sequence[T],
    unused: Sequence[T],
    placement: dict[int, T],
    load: Counter[T],
) -> None:
    """
    Give unused servers one share each: share i to the i-th writable server if both are free, the rest in
    order.
    """
    free = dict.fromkeys(unused)
    for share in unplaced:
        if share < len(writable) and writable[share] in free:
            del free[writable[share]]
            _put(share, [writable[share]], placement, load)
    rest = (share for share in unplaced if share not in placement)
    # zip stops when either servers or shares are used up.
    for server, share in zip(free, list(rest), strict=False):
        _put(share, [server], placement, load)


def _put(share: int, candidates: Iterable[T], placement: dict[int, T], load: Counter[T]) -> None:
    """
    Assign a share to the candidate with the fewest shares; if several have that few, to the first of them.
    """
    server = min(candidates, key=load.__getitem__)
    placement[share] = server
    load[server] += 1


def _maximum_matching(holdings: Sequence[int]) -> dict[int, int]:
    """
    Return a maximum matching, from share to the index of a server.

    Servers are added in order. A server that can take part together with all earlier ones does so, with the
    lowest free share, and stays in the matching when later servers are added.

    Args:
        holdings: for each server, its shares as the set bits of a number. With bits, a step over all shares
            of a server costs as much as a step over one share.
    """
    owner: dict[int, int] = {}
    free = _union(holdings)
    # Shares that a search reached without success. No later search can succeed through them, since the
    # servers that own them hold only such shares.
    exhausted = 0
    for start in range(len(holdings)):
        if not free:
            break
        # For each server that the search reached: the server from which it was reached, and the share that
        # this server would take from it.
        reached_from: dict[int, tuple[int, int]] = {}
        visited = exhausted
        queue = [start]
        for server in queue:  # breadth first; the queue grows meanwhile
            unvisited = holdings[server] & ~visited
            if unvisited & free:
                share = next(_bits(unvisited & free))
                free ^= 1 << share
                # On the path back to the start, each server takes the share found for it, and passes on the
                # share that it had.
                while server != start:
                    owner[share] = server
                    server, share = reached_from[server]
                owner[share] = start
                break
            visited |= unvisited
            for share in _bits(unvisited):
                reached_from[owner[share]] = (server, share)
                queue.append(owner[share])
        else:
            exhausted = visited
    return owner


def _mask(shares: Iterable[int], total_shares: int) -> int:
    return _union(1 << share for share in shares if 0 <= share < total_shares)


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


def _bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


# The permuted ring: an order of all servers for each file, the same for every client.


_KEY_ID_PREFIX = "v0-"
_KEY_ID_CHARACTERS = 52


def permutation_seed(server_id: str, announced: str | None = None) -> bytes:
    """
    Return the bytes that determine a server's position on every file's ring.

    Args:
        server_id: ``v0-`` and the base32 of a public key, or any other text.
        announced: the announcement's ``permutation-seed-base32``, if it has one.

    Raises:
        ValueError: the announced seed is not base32.
    """
    if announced:
        return base32.decode(announced)
    key = server_id.removeprefix(_KEY_ID_PREFIX)
    if key != server_id and len(key) == _KEY_ID_CHARACTERS:
        with suppress(ValueError):  # an id that looks like a key but is not base32 is text
            return base32.decode(key)
    return hashlib.sha256(server_id.encode("utf-8")).digest()


def permuted(
    storage_index: bytes, seeds: Mapping[T, bytes], preferred: Container[T] = ()
) -> list[T]:
    """
    Return the servers in the order in which this file's shares are placed and searched.

    Args:
        storage_index: 16 bytes.
        seeds: the permutation seed of each server. Servers with the same seed keep their order.
        preferred: servers that come before all other servers. Among themselves, they have the usual order.
    """
    start = hashlib.sha1(storage_index, usedforsecurity=False)

    def position(server: T) -> tuple[bool, bytes]:
        sha1 = start.copy()
        sha1.update(seeds[server])
        return server not in preferred, sha1.digest()

    return sorted(seeds, key=position)

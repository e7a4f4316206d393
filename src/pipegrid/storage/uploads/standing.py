"""
Which unfinished uploads are given up when there is no room for another: places, or bytes on the disk.

**Goal.** An upload that was cut off is kept for days, so that it can go on. An honest client finds room all
the same, however many of them others hoard: 4096 allocations of a byte, or one of all free space, denied room
to everybody for half an hour, and would now for a week.

**Whose.** An upload secret tells nothing, since it costs nothing to have another. An address is what costs
most; an IPv6 client has 2^64 of them, which count as one. But behind one address there may be a whole
network, or all of Tor. So it is the address first, and between clients of one address the connection by which
an upload was begun or taken up. What an earlier process left counts as one client's.

**Rules**, for a client that asks for an upload:

1. *Stale* uploads, that nobody has written to for 30 minutes, are given up for anybody, the longest idle
   first. That is as long as Tahoe-LAFS's servers keep any. Beyond it they are kept because there is room.
2. Then those that are *merely allocated*: nothing has come for five minutes, or less than a kilobyte a
   second, or so little that all of it would take more than a day. They are given up, those of whoever has
   most first, and of these the longest idle, if their client has more than the one who asks would have then:
   so many uploads where places are short, so many bytes where room is. Between connections of one address
   that is so as well, and after ten seconds without a write in any case, since connections are cheap.
3. What is *being written* is never given up for what is yet to be, nor what is complete, nor (but for rule
   1) a connection's own.

So who holds little is refused nothing because of who holds much, and who holds most can take nothing from
anybody. An honest client whose upload is given up is told by its next write (404) and begins anew.

**Set aside.** A fixed share for each address: one client alone could not use the disk, and a hundred
addresses would still fill it. Refusing whoever has more than is left: it has to be paid by the honest client
that stores one large share on an almost full disk.

Pure: it is told the time and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv6Address
from typing import Protocol, TypeVar

import attrs

STALE_S = 30 * 60.0
WRITTEN_S = 5 * 60.0
WHOLE_S = 24 * 3600.0
SLOWEST = 1024  # bytes a second; a modem of old makes five times as much
SIBLING_S = 10.0


@attrs.frozen(cache_hash=True)
class Client:
    """
    Who begins uploads.

    Attributes:
        address: empty for this process itself.
        connection: a number.
    """

    address: str = ""
    connection: int = 0


NOBODY = Client()
LEFT_BEHIND = Client("what an earlier process left")


def address_of(host: str) -> str:
    """Return what counts as one address: of IPv6 a network of 2^64."""
    if ":" not in host:
        return host
    try:
        network = int(IPv6Address(host.partition("%")[0])) >> 64
    except ValueError:
        return host
    return f"{IPv6Address(network << 64)}/64"


class Standing(Protocol):
    """
    As much of an unfinished upload as matters here. Times are in seconds of one clock.

    Attributes:
        client: who has it.
        share_bytes: all that it may take of the disk.
        began, last_write: when it was begun, or taken up by this process, and last written to.
        came_bytes: what has been received since it began.
    """

    client: Client
    share_bytes: int
    began: float
    last_write: float

    @property
    def came_bytes(self) -> int:
        """See above."""

    @property
    def remaining_bytes(self) -> int:
        """What has not been received."""

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""


U = TypeVar("U", bound=Standing)


def is_being_written(upload: Standing, now: float) -> bool:
    """Whether it gets on: it is complete, or comes at a pace at which people send things."""
    if upload.complete:
        return True
    if not upload.came_bytes or now - upload.last_write >= WRITTEN_S:
        return False
    took_s = now - upload.began
    if upload.came_bytes < SLOWEST * took_s:
        return False
    return upload.remaining_bytes * took_s <= WHOLE_S * upload.came_bytes


def is_stale(upload: Standing, now: float) -> bool:
    """Whether it is given up for anybody who needs the room, or its share number."""
    return not upload.complete and now - upload.last_write >= STALE_S


@attrs.frozen
class Asked:
    """
    What a client asks for.

    Attributes:
        uploads: how many more; 0 if it is something else that needs the room.
        share_bytes: of each of them.
        missing_uploads, missing_bytes: how much there is not for all of them together.
    """

    uploads: int
    share_bytes: int
    missing_uploads: int
    missing_bytes: int


def choose(uploads: Sequence[U], client: Client, asked: Asked, now: float) -> list[U]:
    """
    Return which to give up so that nothing is missing any more, or as much as is to be had.

    None if it would not be enough for one upload. All of a request's are asked for at once, since going
    through thousands of uploads takes milliseconds.
    """
    by_bytes = asked.missing_bytes > 0
    holdings = _Holdings(uploads, by_bytes)
    wanted = asked.uploads * asked.share_bytes if by_bytes else asked.uploads
    chosen: list[U] = []
    places, room = 0, 0
    for upload, stale in _in_order(uploads, holdings, now):
        if places >= asked.missing_uploads and room >= asked.missing_bytes:
            break
        if stale or holdings.owes(upload, client, wanted, now):
            chosen.append(upload)
            holdings.take(upload)
            places += 1
            room += upload.share_bytes
    others = max(0, asked.uploads - 1)
    enough_for_one = (
        places >= asked.missing_uploads - others
        and room >= asked.missing_bytes - others * asked.share_bytes
    )
    return chosen if enough_for_one else []


class _Holdings:
    """How much each address, and each connection, has: uploads, or bytes."""

    def __init__(self, uploads: Iterable[Standing], by_bytes: bool) -> None:
        self._by_bytes = by_bytes
        self._addresses: dict[str, int] = {}
        self._clients: dict[Client, int] = {}
        for upload in uploads:
            self._add(upload, self._size(upload))

    def take(self, upload: Standing) -> None:
        """It is given up."""
        self._add(upload, -self._size(upload))

    def of(self, upload: Standing) -> tuple[int, int]:
        """Return how much its address has, and its client."""
        return self._addresses[upload.client.address], self._clients[upload.client]

    def owes(self, upload: Standing, client: Client, wanted: int, now: float) -> bool:
        """Whether rule 2 gives an upload that is merely allocated up for a client that wants so much."""
        owner = upload.client
        if owner == client:
            return False
        if owner.address != client.address:
            return self._addresses[owner.address] > self._addresses.get(client.address, 0) + wanted
        if now - upload.last_write >= SIBLING_S:
            return True
        return self._clients[owner] > self._clients.get(client, 0) + wanted

    def _add(self, upload: Standing, size: int) -> None:
        client = upload.client
        self._addresses[client.address] = self._addresses.get(client.address, 0) + size
        self._clients[client] = self._clients.get(client, 0) + size

    def _size(self, upload: Standing) -> int:
        return upload.share_bytes if self._by_bytes else 1


def _in_order(uploads: Sequence[U], holdings: _Holdings, now: float) -> Iterator[tuple[U, bool]]:
    """Yield those that might be given up, and whether they are stale, in the order of the rules."""
    stale: list[U] = []
    hoarded: list[U] = []
    for upload in sorted(uploads, key=lambda each: each.last_write):
        if is_stale(upload, now):
            stale.append(upload)
        elif not is_being_written(upload, now):
            hoarded.append(upload)
    yield from ((each, True) for each in stale)
    hoarded.sort(key=holdings.of, reverse=True)  # which leaves those that are equal in their order
    yield from ((each, False) for each in hoarded)

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
   that is so as well. But first those go that have had no write for ten seconds, the longest idle first and
   whoever has more: connections are cheap.
3. What is *being written* is never given up for what is yet to be, nor what is complete, nor (but for rule
   1) a connection's own.

So who holds little is refused nothing because of who holds much, and who holds most can take nothing from
anybody. An honest client whose upload is given up is told by its next write (404) and begins anew.

**Set aside.** A fixed share for each address: one client alone could not use the disk, and a hundred
addresses would still fill it. Refusing whoever has more than is left: it has to be paid by the honest client
that stores one large share on an almost full disk.

Pure: it is told the time and what there is. Who is next by these rules is found by ``evictionorder``.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from math import inf
from typing import Protocol

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
    """
    Return what counts as one address: an IPv6 address's first half, anything else as it is.

    An IPv4 address is one, however a port that listens for both writes it down.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


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
        """Bytes that have been received since it began."""

    @property
    def remaining_bytes(self) -> int:
        """What has not been received."""

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""


def written_until(upload: Standing) -> float:
    """
    Return until when it gets on, that is, comes at a pace at which people send things, if no more comes.

    Infinite if it is complete, and minus infinite if nothing has come. Whatever comes makes it later.
    """
    if upload.complete:
        return inf
    came = upload.came_bytes
    if not came:
        return -inf
    pace_s = min(came / SLOWEST, WHOLE_S * came / upload.remaining_bytes)
    return min(upload.last_write + WRITTEN_S, upload.began + pace_s)


def is_being_written(upload: Standing, now: float) -> bool:
    """Whether it gets on: it is complete, or comes at such a pace."""
    return now <= written_until(upload)


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

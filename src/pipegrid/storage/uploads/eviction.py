"""
Eviction: the choice of the unfinished uploads to give up when a server lacks slots or disk space for another
upload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from ipaddress import IPv6Address
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

import attrs

# An interrupted upload is kept for days, so that it can be resumed. An honest client must get space
# nevertheless, whatever other clients allocate: otherwise 4096 allocations of one byte, or one allocation of
# all free space, would deny space to all other clients until the uploads expire.
#
# Each upload belongs to a client. A new upload secret costs nothing, so it does not identify a client. A new
# address costs most; the 2^64 addresses of an IPv6 client count as one. But a whole network, or all of Tor,
# may share one address. So clients are compared by address, and clients of one address by the connection that
# began or resumed an upload. Uploads left by an earlier process belong to one client.
#
# For a client that allocates an upload:
#
# 1. Stale uploads, without a write for 30 minutes, are evicted first, the longest idle first. Servers of
#    Tahoe-LAFS do not keep uploads for longer; here they are kept while there is space.
# 2. Then idle uploads: no byte for five minutes, or less than a kilobyte per second, or a pace that would
#    take more than a day. The victim is the client that holds most, counted in uploads if slots are short and
#    in bytes if space is short. The victim must hold more than the allocating client would then hold. Its
#    longest idle uploads are evicted first. Clients are compared by address first, then by connection within
#    the allocating client's address. But connections are cheap: within that address, idle uploads of other
#    connections without a write for ten seconds are evicted before connections are compared, the longest idle
#    first.
# 3. Uploads that are being written, complete uploads, and (except by rule 1) uploads of the allocating
#    connection are never evicted.
#
# So a client that holds little is never rejected because of one that holds much, and the client that holds
# most cannot evict uploads of other clients. An honest client whose upload was evicted gets 404 for its next
# write, and starts again.
#
# Rejected alternatives: a fixed share of space for each address (one client alone could not use the disk, and
# a hundred addresses would still fill it), and rejecting large allocations (an honest client that stores one
# large share on an almost full disk would suffer).

STALE_S = 30 * 60.0
WRITTEN_S = 5 * 60.0
WHOLE_S = 24 * 3600.0
SLOWEST = 1024  # bytes per second; an old modem is five times as fast
SIBLING_S = 10.0


@attrs.frozen(cache_hash=True)
class Client:
    """
    The client that begins an upload.

    Attributes:
        address: empty if this process itself is the client.
        connection: the number of the connection.
    """

    address: str = ""
    connection: int = 0


NOBODY = Client()
LEFT_BEHIND = Client("what an earlier process left")


def address_of(host: str) -> str:
    """
    Return the part of an address that identifies a client: the first half of an IPv6 address, or a whole IPv4
    address.

    A port that listens for IPv4 and IPv6 reports IPv4 addresses in IPv6 notation; these are converted.
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


class UploadUsage(Protocol):
    """
    The fields of an unfinished upload that eviction uses. Times are in seconds of one clock.

    Attributes:
        client: the client that the upload belongs to.
        share_bytes: the disk space that the upload may take.
        began: when the upload was begun, or resumed by this process.
        last_write: when the upload was last written to.
        came_bytes: how many bytes were received since ``began``.
    """

    client: Client
    share_bytes: int
    began: float
    last_write: float

    @property
    def came_bytes(self) -> int:
        """How many bytes were received since ``began``."""

    @property
    def remaining_bytes(self) -> int:
        """How many bytes have not been received yet."""

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""


def written_until(upload: UploadUsage) -> float:
    """
    Return until when the upload counts as being written if no more bytes arrive. Each byte moves this time
    later.

    Infinite if the upload is complete, and minus infinite if nothing has arrived.
    """
    if upload.complete:
        return inf
    came = upload.came_bytes
    if not came:
        return -inf
    pace_s = min(came / SLOWEST, WHOLE_S * came / upload.remaining_bytes)
    return min(upload.last_write + WRITTEN_S, upload.began + pace_s)


def is_being_written(upload: UploadUsage, now: float) -> bool:
    """Return whether the upload is complete, or being written at a realistic pace."""
    return now <= written_until(upload)


def is_stale(upload: UploadUsage, now: float) -> bool:
    """
    Return whether the upload may be removed for any client that needs its space, or that uploads the same
    share.
    """
    return not upload.complete and now - upload.last_write >= STALE_S


@attrs.frozen
class UploadDemand:
    """
    The space and slots that a client requests.

    Attributes:
        uploads: how many uploads the client wants to begin; 0 if something else needs the space.
        share_bytes: the length of each of these shares.
        missing_uploads, missing_bytes: how many slots and bytes are lacking for all of them together.
    """

    uploads: int
    share_bytes: int
    missing_uploads: int
    missing_bytes: int


# Examining all of 4096 uploads took ten milliseconds, during which no other client was served. With heaps
# each choice takes a few steps.
#
# The key of an upload is its last write, and the key of a client is minus what it holds. A write makes the
# upload's key higher, and an eviction makes the client's key higher, so keys of existing entries only rise.
# Therefore writes do not update heaps: an entry that comes first with an outdated key is then moved to its
# place. What would lower a key (another upload of the client, a client that stops writing) adds a second
# entry. A heap is cleaned when it has doubled.
#
# Uploads that are being written are kept in a separate heap until the time at which they would count as idle
# (``written_until``). Then they are examined again.

T = TypeVar("T")
Ordered = TypeVar("Ordered", bound=UploadUsage)

_SPARE = 64
_NUMBERS = count()  # numbers of heap entries, so that equal keys keep their order


class _Heap(Generic[T]):
    """
    A heap that returns the item with the lowest key.

    Args:
        key: returns the current key of an item, which is never below its key when the item was added. None:
            the item is removed from the heap.
    """

    def __init__(self, key: Callable[[T], float | None]) -> None:
        self._key = key
        self._entries: list[tuple[float, int, T]] = []
        self._sweep_at = _SPARE

    def put(self, item: T) -> None:
        """Add an item, even if the heap contains it already."""
        key = self._key(item)
        if key is not None:
            heappush(self._entries, (key, next(_NUMBERS), item))
            if len(self._entries) > self._sweep_at:
                self._sweep()

    def fill(self, items: Iterable[T]) -> None:
        """Add many items to an empty heap."""
        key = self._key
        keys = [(key(item), next(_NUMBERS), item) for item in items]
        self._entries = [(at, number, item) for at, number, item in keys if at is not None]
        heapify(self._entries)
        self._sweep_at = 2 * len(self._entries) + _SPARE

    def first(self, but: T | None = None) -> T | None:
        """Return the item with the lowest key, ignoring ``but``. None if there is none."""
        entries, aside = self._entries, None
        found: T | None = None
        while entries:
            key, number, item = entries[0]
            now = self._key(item)
            if now is None:
                heappop(entries)
            elif now != key:
                heapreplace(entries, (now, number, item))
            elif item is but:
                aside = heappop(entries)
            else:
                found = item
                break
        if aside is not None:
            heappush(entries, aside)
        return found

    def _sweep(self) -> None:
        items = {id(item): item for _, _, item in sorted(self._entries, key=lambda each: each[1])}
        self.fill(items.values())


class _Entry(Generic[Ordered]):
    """
    One upload. ``here`` is False while the upload cannot be evicted, because it is chosen already or has
    ended.
    """

    __slots__ = ("here", "holder", "size", "upload")

    def __init__(self, upload: Ordered, size: int, holder: _Holder[Ordered]) -> None:
        self.upload = upload
        self.size = size
        self.holder = holder
        self.here = True


class _Address(Generic[Ordered]):
    """
    The uploads of one address: a heap of its clients by what they hold, and a heap of its clients by their
    longest idle upload.
    """

    def __init__(self) -> None:
        self.held = 0
        self.uploads = 0
        self.most: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_held)
        self.idle: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_idle)

    def by_held(self) -> float | None:
        """
        Return the address's key in the heap of addresses; None if nothing of the address can be evicted.
        """
        return None if self.most.first() is None else -self.held


class _Holder(Generic[Ordered]):
    """The uploads of one client: how much it holds, and a heap of its idle uploads."""

    def __init__(
        self,
        client: Client,
        address: _Address[Ordered],
        key: Callable[[_Entry[Ordered]], float | None],
    ) -> None:
        self.client = client
        self.address = address
        self.held = 0
        self.uploads = 0
        self.idle: _Heap[_Entry[Ordered]] = _Heap(key)

    def by_held(self) -> float | None:
        """
        Return the client's key in its address's heap by held bytes or uploads; None if it has nothing to
        evict.
        """
        return None if self.idle.first() is None else -self.held

    def by_idle(self) -> float | None:
        """Return the client's key by idleness: the last write of its longest idle upload."""
        first = self.idle.first()
        return None if first is None else first.upload.last_write


class EvictionOrder(Generic[Ordered]):
    """
    All unfinished uploads in the order of eviction.

    Args:
        uploads: all existing uploads.
        by_bytes: whether what clients hold is counted in bytes, or else in uploads.
        now: the time, which must not go back.
    """

    def __init__(self, uploads: Iterable[Ordered], by_bytes: bool, now: float) -> None:
        self._by_bytes = by_bytes
        self._now = now
        self._entries: dict[Ordered, _Entry[Ordered]] = {}
        self._addresses: dict[str, _Address[Ordered]] = {}
        self._holders: dict[Client, _Holder[Ordered]] = {}
        self._most: _Heap[_Address[Ordered]] = _Heap(_Address.by_held)
        self._stale: _Heap[_Entry[Ordered]] = _Heap(_by_age)
        self._written: list[tuple[float, int, _Entry[Ordered]]] = []  # until when
        entries = [self._enter(upload) for upload in uploads]
        of_holders: dict[_Holder[Ordered], list[_Entry[Ordered]]] = {}
        for entry in entries:
            of_holders.setdefault(entry.holder, []).append(entry)
        self._stale.fill(entries)
        of_addresses: dict[_Address[Ordered], list[_Holder[Ordered]]] = {}
        for holder, own in of_holders.items():
            holder.idle.fill(own)
            of_addresses.setdefault(holder.address, []).append(holder)
        for address, holders in of_addresses.items():
            address.most.fill(holders)
            address.idle.fill(holders)
        self._most.fill(of_addresses)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, upload: Ordered) -> bool:
        return upload in self._entries

    def add(self, upload: Ordered) -> None:
        """
        Add an upload that has begun. Also used, after ``remove``, for an upload that another client has
        resumed.
        """
        self._offer(self._enter(upload))

    def _enter(self, upload: Ordered) -> _Entry[Ordered]:
        client = upload.client
        holder = self._holders.get(client)
        if holder is None:
            address = self._addresses.get(client.address)
            if address is None:
                address = self._addresses[client.address] = _Address()
            holder = self._holders[client] = _Holder(client, address, self._by_idle)
        entry = _Entry(upload, upload.share_bytes if self._by_bytes else 1, holder)
        self._entries[upload] = entry
        holder.uploads += 1
        holder.address.uploads += 1
        holder.held += entry.size
        holder.address.held += entry.size
        return entry

    def remove(self, upload: Ordered) -> None:
        """Remove an upload that has ended, or that will belong to another client."""
        entry = self._entries.pop(upload, None)
        if entry is None:
            return
        self._take(entry)
        holder, client = entry.holder, entry.holder.client
        holder.uploads -= 1
        holder.address.uploads -= 1
        if not holder.uploads:
            del self._holders[client]
        if not holder.address.uploads:
            del self._addresses[client.address]

    def choose(self, client: Client, asked: UploadDemand, now: float) -> list[Ordered]:
        """
        Return which uploads to evict so that nothing is missing any more, or as little as possible.

        The list is empty if evictions would not suffice for even one of the requested uploads.
        """
        self._now = now
        self._look_at_written()
        wanted = asked.uploads * asked.share_bytes if self._by_bytes else asked.uploads
        chosen: list[_Entry[Ordered]] = []
        places, room = 0, 0
        while places < asked.missing_uploads or room < asked.missing_bytes:
            entry = self._next(client, wanted)
            if entry is None:
                break
            self._take(entry)
            chosen.append(entry)
            places += 1
            room += entry.upload.share_bytes
        for entry in chosen:
            entry.here = True
            entry.holder.held += entry.size
            entry.holder.address.held += entry.size
            self._offer(entry)
        others = max(0, asked.uploads - 1)
        enough_for_one = (
            places >= asked.missing_uploads - others
            and room >= asked.missing_bytes - others * asked.share_bytes
        )
        return [entry.upload for entry in chosen] if enough_for_one else []

    def _next(self, client: Client, wanted: int) -> _Entry[Ordered] | None:
        """
        Return the next upload to evict for a client that requests ``wanted`` uploads or bytes. None if there
        is none.
        """
        stale = self._stale.first()
        if stale is not None and is_stale(stale.upload, self._now):
            return stale
        own, mine = self._addresses.get(client.address), self._holders.get(client)
        address = self._most.first(own)
        if address is not None and address.held > (own.held if own is not None else 0) + wanted:
            holder = address.most.first()
            return None if holder is None else holder.idle.first()
        if own is None:
            return None
        holder = own.idle.first(mine)
        entry = None if holder is None else holder.idle.first()
        if entry is not None and self._now - entry.upload.last_write >= SIBLING_S:
            return entry
        holder = own.most.first(mine)
        if holder is not None and holder.held > (mine.held if mine is not None else 0) + wanted:
            return holder.idle.first()
        return None

    def _offer(self, entry: _Entry[Ordered]) -> None:
        """Add an upload to the heaps again, so that it can be evicted."""
        self._stale.put(entry)
        self._show(entry)

    def _show(self, entry: _Entry[Ordered]) -> None:
        holder = entry.holder
        holder.idle.put(entry)
        holder.address.most.put(holder)
        holder.address.idle.put(holder)
        self._most.put(holder.address)

    def _take(self, entry: _Entry[Ordered]) -> None:
        entry.here = False
        entry.holder.held -= entry.size
        entry.holder.address.held -= entry.size

    def _by_idle(self, entry: _Entry[Ordered]) -> float | None:
        """
        Return an upload's key in the heap of its client's idle uploads. None if the upload is complete, is
        being written, or cannot be evicted.
        """
        if not entry.here:
            return None
        until = written_until(entry.upload)
        if self._now <= until:
            if until < inf:
                heappush(self._written, (until, next(_NUMBERS), entry))
            return None
        return entry.upload.last_write

    def _look_at_written(self) -> None:
        """Examine again the uploads that would count as idle by now if nothing had arrived."""
        while self._written and self._written[0][0] < self._now:
            entry = heappop(self._written)[2]
            if entry.here:
                self._show(entry)  # moves it back if bytes have arrived


def _by_age(entry: _Entry[Ordered]) -> float | None:
    return entry.upload.last_write if entry.here and not entry.upload.complete else None


# The caller of the methods of ``Eviction`` holds the registry's lock. No method waits for anything.


class Held(UploadUsage, Protocol):
    """An upload that a client may resume."""

    def take_up(self, client: Client) -> None:
        """Make the upload belong to a client."""


U = TypeVar("U", bound=Held)


class Eviction(Generic[U]):
    """The uploads of a store in the order of eviction. The order is built when space is short."""

    def __init__(self) -> None:
        self._orders: dict[bool, EvictionOrder[U]] = {}  # True: counts bytes; False: counts uploads
        # Clients for which nothing could be evicted, each with the second in which this happened.
        self._without_effect: dict[Client, int] = {}

    def choose(
        self, uploads: Collection[U], client: Client, asked: UploadDemand, now: float
    ) -> list[U]:
        """
        Return which uploads to evict for a demand. If the list is empty, the demand must be rejected.

        Args:
            uploads: all existing uploads.
        """
        second = int(now)
        if self._without_effect.get(client) == second:
            return []
        by_bytes = asked.missing_bytes > 0
        order = self._orders.get(by_bytes)
        if order is None:
            order = self._orders[by_bytes] = EvictionOrder(uploads, by_bytes, now)
        chosen = order.choose(client, asked, now)
        if not chosen:
            recent = {each: at for each, at in self._without_effect.items() if at == second}
            self._without_effect = {**recent, client: second}
        return list(chosen)

    def hand_over(self, upload: U, client: Client) -> None:
        """Make an upload belong to another client from now on."""
        orders = [each for each in self._orders.values() if upload in each]
        for order in orders:
            order.remove(upload)
        upload.take_up(client)
        for order in orders:
            order.add(upload)

    def add(self, upload: U) -> None:
        """Add an upload that has begun, and may be evicted."""
        for order in self._orders.values():
            order.add(upload)

    def remove(self, upload: U) -> None:
        """Remove an upload that has ended, successfully or not."""
        for order in self._orders.values():
            order.remove(upload)

    def clear(self) -> None:
        """
        Drop the order, which is built again when space is short. This is cheap if it happens every few
        minutes.
        """
        self._orders.clear()

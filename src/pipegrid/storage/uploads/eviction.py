"""Eviction: which unfinished uploads are given up when a server lacks slots or disk space for another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from ipaddress import IPv6Address
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

import attrs

# An interrupted upload is kept for days, so that it can be resumed. An honest client must get space
# nevertheless, whatever other clients allocate: otherwise 4096 allocations of a byte, or one of all free
# space, would deny space to all others until they expire.
#
# Uploads are attributed to clients. A new upload secret costs nothing, so it does not identify one. An
# address costs most; an IPv6 client has 2^64 of them, which count as one. But a whole network, or all of Tor,
# may share one address. So clients are compared by address, and clients of one address by the connection that
# began or resumed an upload. Uploads left by an earlier process belong to one client.
#
# For a client that allocates an upload:
#
# 1. Stale uploads, without a write for 30 minutes, are evicted first, the longest idle first. Servers of
#    Tahoe-LAFS keep none longer. Beyond that they are kept only while there is space.
# 2. Then idle ones: no byte for five minutes, or less than a kilobyte a second, or a pace that would take
#    more than a day. Those of the client that holds most are evicted first, and of these the longest idle,
#    if their client holds more than the allocating client would then: uploads where slots are short, bytes
#    where space is. The same holds between connections of one address. But first, those without a write for
#    ten seconds are evicted, the longest idle first and of the client that holds more: connections are cheap.
# 3. Uploads that are being written, complete ones, and (except by rule 1) the connection's own are never
#    evicted.
#
# So a client that holds little is never rejected because of one that holds much, and one that holds most can
# evict no other's. An honest client whose upload was evicted gets 404 for its next write, and starts again.
#
# Rejected alternatives: a fixed share of space for each address (one client alone could not use the disk, and
# a hundred addresses would still fill it), and rejecting large allocations (an honest client that stores one
# large share on an almost full disk would suffer).

STALE_S = 30 * 60.0
WRITTEN_S = 5 * 60.0
WHOLE_S = 24 * 3600.0
SLOWEST = 1024  # bytes a second; an old modem sends five times as much
SIBLING_S = 10.0


@attrs.frozen(cache_hash=True)
class Client:
    """
    The client that begins an upload.

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
    Return what counts as one address: the first half of an IPv6 address, others unchanged.

    An IPv4 address is the same in the IPv6 notation of a port that listens for both.
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
        client: the owner.
        share_bytes: the disk space that it may take.
        began, last_write: when it was begun, or resumed by this process, and last written to.
        came_bytes: bytes received since it began.
    """

    client: Client
    share_bytes: int
    began: float
    last_write: float

    @property
    def came_bytes(self) -> int:
        """Bytes received since it began."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes that have not been received yet."""

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""


def written_until(upload: UploadUsage) -> float:
    """
    Return until when it counts as being written if no more bytes arrive.

    Infinite if it is complete, and minus infinite if nothing has arrived. Each byte makes it later.
    """
    if upload.complete:
        return inf
    came = upload.came_bytes
    if not came:
        return -inf
    pace_s = min(came / SLOWEST, WHOLE_S * came / upload.remaining_bytes)
    return min(upload.last_write + WRITTEN_S, upload.began + pace_s)


def is_being_written(upload: UploadUsage, now: float) -> bool:
    """Whether it is complete, or being written at a realistic pace."""
    return now <= written_until(upload)


def is_stale(upload: UploadUsage, now: float) -> bool:
    """Whether any client may displace it: one that needs its space, or that uploads the same share."""
    return not upload.complete and now - upload.last_write >= STALE_S


@attrs.frozen
class UploadDemand:
    """
    What a client requests.

    Attributes:
        uploads: how many more; 0 if something else needs the space.
        share_bytes: of each of them.
        missing_uploads, missing_bytes: how much is lacking for all of them together.
    """

    uploads: int
    share_bytes: int
    missing_uploads: int
    missing_bytes: int


# Going through 4096 uploads took ten milliseconds, during which no other client was served. With heaps each
# choice takes a few steps.
#
# A write makes an upload younger, and an eviction makes a client's holdings smaller, so keys of existing
# entries only rise. Therefore writes do not update heaps: an entry that comes first with an outdated key is
# moved to its place then. What would lower a key (another upload, a client that stops writing) adds a
# second entry. A heap is cleaned when it has doubled.
#
# Uploads that are being written are in a separate heap until the moment at which they would count as idle
# (``written_until``), and are examined again then.

T = TypeVar("T")
Ordered = TypeVar("Ordered", bound=UploadUsage)

_SPARE = 64
_NUMBERS = count()  # of entries of heaps: equal keys keep their order


class _Heap(Generic[T]):
    """
    Returns the item with the lowest key.

    Args:
        key: the item's current key, never below its key when it was added; None: the item was removed.
    """

    def __init__(self, key: Callable[[T], float | None]) -> None:
        self._key = key
        self._entries: list[tuple[float, int, T]] = []
        self._sweep_at = _SPARE

    def put(self, item: T) -> None:
        """Add an item, possibly again."""
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
        """Return the first item, or the first other than ``but``; None if there is none."""
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
    """One upload; ``here`` is whether it may still be evicted."""

    __slots__ = ("here", "holder", "size", "upload")

    def __init__(self, upload: Ordered, size: int, holder: _Holder[Ordered]) -> None:
        self.upload = upload
        self.size = size
        self.holder = holder
        self.here = True


class _Address(Generic[Ordered]):
    """The uploads of one address, by its clients: which holds most, and whose upload is idle for longest."""

    def __init__(self) -> None:
        self.held = 0
        self.uploads = 0
        self.most: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_held)
        self.idle: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_idle)

    def by_held(self) -> float | None:
        """Return its key among addresses; None if it has nothing to evict."""
        return None if self.most.first() is None else -self.held


class _Holder(Generic[Ordered]):
    """The uploads of one client: how much it holds, and the idle ones."""

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
        """Return its key among the clients of its address."""
        return None if self.idle.first() is None else -self.held

    def by_idle(self) -> float | None:
        """Return its other key, the last write of its longest idle upload."""
        first = self.idle.first()
        return None if first is None else first.upload.last_write


class EvictionOrder(Generic[Ordered]):
    """
    All unfinished uploads in the order of eviction.

    Args:
        uploads: all that exist.
        by_bytes: whether holdings are counted in bytes, or in uploads.
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
        """Add an upload that has begun, or that another client has resumed, after removing it."""
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
        """Remove an upload that has ended, or that gets another client."""
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
        Return which uploads to evict so that nothing is missing any more, or as much as possible.

        None if it would not be enough for one upload.
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
        """Return the next upload to evict for a client that wants this much; None if there is none."""
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
        """Add an entry to the heaps."""
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
        """Return an upload's key among those of its client; None for one that is being written."""
        if not entry.here:
            return None
        until = written_until(entry.upload)
        if self._now <= until:
            if until < inf:
                heappush(self._written, (until, next(_NUMBERS), entry))
            return None
        return entry.upload.last_write

    def _look_at_written(self) -> None:
        """Examine again the uploads whose time of being written has passed."""
        while self._written and self._written[0][0] < self._now:
            entry = heappop(self._written)[2]
            if entry.here:
                self._show(entry)  # moves it to the other heap again if something has arrived


def _by_age(entry: _Entry[Ordered]) -> float | None:
    return entry.upload.last_write if entry.here and not entry.upload.complete else None


# The caller holds the registry's lock; no method waits.


class Held(UploadUsage, Protocol):
    """An upload that a client may resume."""

    def take_up(self, client: Client) -> None:
        """Make it belong to a client."""


U = TypeVar("U", bound=Held)


class Eviction(Generic[U]):
    """The uploads of a store in the order of eviction, which is built when space is short."""

    def __init__(self) -> None:
        self._orders: dict[bool, EvictionOrder[U]] = {}  # by what is counted: bytes, or uploads
        # Clients for which nothing could be evicted, each with the second in which that was found out.
        self._without_effect: dict[Client, int] = {}

    def choose(
        self, uploads: Collection[U], client: Client, asked: UploadDemand, now: float
    ) -> list[U]:
        """
        Return which uploads to evict for a demand; an empty list: reject it.

        Args:
            uploads: all that exist.
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
        """Remove an upload that has ended, in whatever way."""
        for order in self._orders.values():
            order.remove(upload)

    def clear(self) -> None:
        """Build the order again when space is short: that is cheap every few minutes."""
        self._orders.clear()

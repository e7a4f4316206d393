"""Eviction policy for unfinished uploads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from ipaddress import IPv6Address
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar

import attrs

# Which unfinished uploads are given up when there is no room for another: places, or bytes on the disk.
#
# **Goal.** An upload that was cut off is kept for days, so that it can go on. An honest client finds room all
# the same, however many of them others hoard: 4096 allocations of a byte, or one of all free space,
# denied room to everybody for half an hour, and would now for a week.
#
# **Whose.** An upload secret tells nothing, since it costs nothing to have another. An address is what costs
# most; an IPv6 client has 2^64 of them, which count as one. But behind one address there may be a whole
# network, or all of Tor. So it is the address first, and between clients of one address the connection by
# which an upload was begun or taken up. What an earlier process left counts as one client's.
#
# **Rules**, for a client that asks for an upload:
#
# 1. *Stale* uploads, that nobody has written to for 30 minutes, are given up for anybody, the longest idle
#    first. That is as long as Tahoe-LAFS's servers keep any. Beyond it they are kept because there is room.
# 2. Then those that are *merely allocated*: nothing has come for five minutes, or less than a kilobyte a
#    second, or so little that all of it would take more than a day. They are given up, those of whoever has
#    most first, and of these the longest idle, if their client has more than the one who asks would have
# then:
#    so many uploads where places are short, so many bytes where room is. Between connections of one address
#    that is so as well. But first those go that have had no write for ten seconds, the longest idle first and
#    whoever has more: connections are cheap.
# 3. What is *being written* is never given up for what is yet to be, nor what is complete, nor (but for rule
#    1) a connection's own.
#
# So who holds little is refused nothing because of who holds much, and who holds most can take nothing from
# anybody. An honest client whose upload is given up is told by its next write (404) and begins anew.
#
# **Set aside.** A fixed share for each address: one client alone could not use the disk, and a hundred
# addresses would still fill it. Refusing whoever has more than is left: it has to be paid by the honest
# client that stores one large share on an almost full disk.
#
# Pure: it is told the time and what there is. Who is next by these rules is found by ``evictionorder``.

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


class UploadUsage(Protocol):
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


def written_until(upload: UploadUsage) -> float:
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


def is_being_written(upload: UploadUsage, now: float) -> bool:
    """Whether it gets on: it is complete, or comes at such a pace."""
    return now <= written_until(upload)


def is_stale(upload: UploadUsage, now: float) -> bool:
    """Whether it is given up for anybody who needs the room, or its share number."""
    return not upload.complete and now - upload.last_write >= STALE_S


@attrs.frozen
class UploadDemand:
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


# Unfinished uploads in the order in which they are evicted (see ``standing``), without going through them.
#
# A request that finds no room asks who has most and what has been idle for longest. Going through 4096
# uploads took ten milliseconds, in which nobody else was served. Here each answer takes a few steps up
# and down heaps.
#
# **Heaps that are looked after late.** A write only makes an upload younger, and what is given up or finished
# makes a client's holdings less: keys only rise by themselves. So nobody is told of a write. Whatever comes
# first with an old key is put where it belongs when it comes first. What would lower a key (another
# upload, one whose client has stopped writing) adds a second entry. Heaps are swept when they have
# doubled.
#
# **What is being written** is set aside until the moment at which it would count as idle if nothing more came
# (``standing.written_until``), and looked at again then.

T = TypeVar("T")
Ordered = TypeVar("Ordered", bound=UploadUsage)

_SPARE = 64
_NUMBERS = count()  # of entries of heaps: what is equal stays in its order


class _Heap(Generic[T]):
    """
    Gives the item that comes first.

    Args:
        key: says where an item belongs now, never before where it was when it was put in; None: nowhere.
    """

    def __init__(self, key: Callable[[T], float | None]) -> None:
        self._key = key
        self._entries: list[tuple[float, int, T]] = []
        self._sweep_at = _SPARE

    def put(self, item: T) -> None:
        """Put an item in, once more perhaps."""
        key = self._key(item)
        if key is not None:
            heappush(self._entries, (key, next(_NUMBERS), item))
            if len(self._entries) > self._sweep_at:
                self._sweep()

    def fill(self, items: Iterable[T]) -> None:
        """Put many in at once, where there were none."""
        key = self._key
        keys = [(key(item), next(_NUMBERS), item) for item in items]
        self._entries = [(at, number, item) for at, number, item in keys if at is not None]
        heapify(self._entries)
        self._sweep_at = 2 * len(self._entries) + _SPARE

    def first(self, but: T | None = None) -> T | None:
        """Return the first item, or the first other than one; None: there is none."""
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
    """One upload; ``here`` is whether it may still be given up."""

    __slots__ = ("here", "holder", "size", "upload")

    def __init__(self, upload: Ordered, size: int, holder: _Holder[Ordered]) -> None:
        self.upload = upload
        self.size = size
        self.holder = holder
        self.here = True


class _Address(Generic[Ordered]):
    """What one address has, and its clients: who has most, and whose upload has been idle for longest."""

    def __init__(self) -> None:
        self.held = 0
        self.uploads = 0
        self.most: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_held)
        self.idle: _Heap[_Holder[Ordered]] = _Heap(_Holder.by_idle)

    def by_held(self) -> float | None:
        """Return its key among addresses; None if it has nothing that could be given up."""
        return None if self.most.first() is None else -self.held


class _Holder(Generic[Ordered]):
    """What one client has: how much in all, and which of it is idle."""

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
        """Return its key among clients of its address."""
        return None if self.idle.first() is None else -self.held

    def by_idle(self) -> float | None:
        """Return another, the time of the longest idle of its uploads."""
        first = self.idle.first()
        return None if first is None else first.upload.last_write


class EvictionOrder(Generic[Ordered]):
    """
    All unfinished uploads, for choosing among them.

    Args:
        uploads: those that there are.
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
        """One more has begun, or has been taken up by another client; then it has to be removed before."""
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
        """It has ended, or is about to have another client."""
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
        Return which to give up so that nothing is missing any more, or as much as is to be had.

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
        """Return which is the next to go for a client that wants so much; None: there is none."""
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
        """Put it where it may be found."""
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
        """Return an upload's key among those of its client; what is being written is set aside."""
        if not entry.here:
            return None
        until = written_until(entry.upload)
        if self._now <= until:
            if until < inf:
                heappush(self._written, (until, next(_NUMBERS), entry))
            return None
        return entry.upload.last_write

    def _look_at_written(self) -> None:
        """Look again at what was being written, and would not be any more if nothing had come."""
        while self._written and self._written[0][0] < self._now:
            entry = heappop(self._written)[2]
            if entry.here:
                self._show(entry)  # which sets it aside again if something has


def _by_age(entry: _Entry[Ordered]) -> float | None:
    return entry.upload.last_write if entry.here and not entry.upload.complete else None


# Which unfinished uploads give way to what others ask for: ``standing``'s rule, kept ready for a full disk.
#
# Nothing here waits or takes a lock; the table's is held by whoever calls.


class Held(UploadUsage, Protocol):
    """An upload that somebody may take up."""

    def take_up(self, client: Client) -> None:
        """Have it belong to a client."""


U = TypeVar("U", bound=Held)


class Eviction(Generic[U]):
    """The uploads of a store, in the order in which they would be given up; made when there is no room."""

    def __init__(self) -> None:
        self._orders: dict[bool, EvictionOrder[U]] = {}  # by what is counted: bytes, or places
        # Who asked in which second, and nobody had to make room.
        self._in_vain: dict[Client, int] = {}

    def choose(
        self, uploads: Collection[U], client: Client, asked: UploadDemand, now: float
    ) -> list[U]:
        """
        Return which uploads to give up for what is asked; none: it has to be refused.

        Args:
            uploads: all that there are.
        """
        second = int(now)
        if self._in_vain.get(client) == second:
            return []
        by_bytes = asked.missing_bytes > 0
        order = self._orders.get(by_bytes)
        if order is None:
            order = self._orders[by_bytes] = EvictionOrder(uploads, by_bytes, now)
        chosen = order.choose(client, asked, now)
        if not chosen:
            recent = {each: at for each, at in self._in_vain.items() if at == second}
            self._in_vain = {**recent, client: second}
        return list(chosen)

    def hand_over(self, upload: U, client: Client) -> None:
        """Have an upload belong to a client from now on."""
        orders = [each for each in self._orders.values() if upload in each]
        for order in orders:
            order.remove(upload)
        upload.take_up(client)
        for order in orders:
            order.add(upload)

    def add(self, upload: U) -> None:
        """Another upload has begun, and may have to give way."""
        for order in self._orders.values():
            order.add(upload)

    def remove(self, upload: U) -> None:
        """An upload has ended, however that was, and cannot give way any more."""
        for order in self._orders.values():
            order.remove(upload)

    def clear(self) -> None:
        """Make the order anew when there is no room: that costs little every few minutes."""
        self._orders.clear()

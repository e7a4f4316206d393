"""
Unfinished uploads in the order in which they are evicted (see ``standing``), without going through them.

A request that finds no room asks who has most and what has been idle for longest. Going through 4096 uploads
took ten milliseconds, in which nobody else was served. Here each answer takes a few steps up and down heaps.

**Heaps that are looked after late.** A write only makes an upload younger, and what is given up or finished
makes a client's holdings less: keys only rise by themselves. So nobody is told of a write. Whatever comes
first with an old key is put where it belongs when it comes first. What would lower a key (another upload, one
whose client has stopped writing) adds a second entry. Heaps are swept when they have doubled.

**What is being written** is set aside until the moment at which it would count as idle if nothing more came
(``standing.written_until``), and looked at again then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, TypeVar

from pipegrid.storage.uploads import standing
from pipegrid.storage.uploads.standing import Asked, Client, Standing

T = TypeVar("T")
U = TypeVar("U", bound=Standing)

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


class _Entry(Generic[U]):
    """One upload; ``here`` is whether it may still be given up."""

    __slots__ = ("here", "holder", "size", "upload")

    def __init__(self, upload: U, size: int, holder: _Holder[U]) -> None:
        self.upload = upload
        self.size = size
        self.holder = holder
        self.here = True


class _Address(Generic[U]):
    """What one address has, and its clients: who has most, and whose upload has been idle for longest."""

    def __init__(self) -> None:
        self.held = 0
        self.uploads = 0
        self.most: _Heap[_Holder[U]] = _Heap(_Holder.by_held)
        self.idle: _Heap[_Holder[U]] = _Heap(_Holder.by_idle)

    def by_held(self) -> float | None:
        """Return its key among addresses; None if it has nothing that could be given up."""
        return None if self.most.first() is None else -self.held


class _Holder(Generic[U]):
    """What one client has: how much in all, and which of it is idle."""

    def __init__(
        self, client: Client, address: _Address[U], key: Callable[[_Entry[U]], float | None]
    ) -> None:
        self.client = client
        self.address = address
        self.held = 0
        self.uploads = 0
        self.idle: _Heap[_Entry[U]] = _Heap(key)

    def by_held(self) -> float | None:
        """Return its key among clients of its address."""
        return None if self.idle.first() is None else -self.held

    def by_idle(self) -> float | None:
        """Return another, the time of the longest idle of its uploads."""
        first = self.idle.first()
        return None if first is None else first.upload.last_write


class EvictionOrder(Generic[U]):
    """
    All unfinished uploads, for choosing among them.

    Args:
        uploads: those that there are.
        by_bytes: whether holdings are counted in bytes, or in uploads.
        now: the time, which must not go back.
    """

    def __init__(self, uploads: Iterable[U], by_bytes: bool, now: float) -> None:
        self._by_bytes = by_bytes
        self._now = now
        self._entries: dict[U, _Entry[U]] = {}
        self._addresses: dict[str, _Address[U]] = {}
        self._holders: dict[Client, _Holder[U]] = {}
        self._most: _Heap[_Address[U]] = _Heap(_Address.by_held)
        self._stale: _Heap[_Entry[U]] = _Heap(_by_age)
        self._written: list[tuple[float, int, _Entry[U]]] = []  # until when
        entries = [self._enter(upload) for upload in uploads]
        of_holders: dict[_Holder[U], list[_Entry[U]]] = {}
        for entry in entries:
            of_holders.setdefault(entry.holder, []).append(entry)
        self._stale.fill(entries)
        of_addresses: dict[_Address[U], list[_Holder[U]]] = {}
        for holder, own in of_holders.items():
            holder.idle.fill(own)
            of_addresses.setdefault(holder.address, []).append(holder)
        for address, holders in of_addresses.items():
            address.most.fill(holders)
            address.idle.fill(holders)
        self._most.fill(of_addresses)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, upload: U) -> bool:
        return upload in self._entries

    def add(self, upload: U) -> None:
        """One more has begun, or has been taken up by another client; then it has to be removed before."""
        self._offer(self._enter(upload))

    def _enter(self, upload: U) -> _Entry[U]:
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

    def remove(self, upload: U) -> None:
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

    def choose(self, client: Client, asked: Asked, now: float) -> list[U]:
        """
        Return which to give up so that nothing is missing any more, or as much as is to be had.

        None if it would not be enough for one upload.
        """
        self._now = now
        self._look_at_written()
        wanted = asked.uploads * asked.share_bytes if self._by_bytes else asked.uploads
        chosen: list[_Entry[U]] = []
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

    def _next(self, client: Client, wanted: int) -> _Entry[U] | None:
        """Return which is the next to go for a client that wants so much; None: there is none."""
        stale = self._stale.first()
        if stale is not None and standing.is_stale(stale.upload, self._now):
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
        if entry is not None and self._now - entry.upload.last_write >= standing.SIBLING_S:
            return entry
        holder = own.most.first(mine)
        if holder is not None and holder.held > (mine.held if mine is not None else 0) + wanted:
            return holder.idle.first()
        return None

    def _offer(self, entry: _Entry[U]) -> None:
        """Put it where it may be found."""
        self._stale.put(entry)
        self._show(entry)

    def _show(self, entry: _Entry[U]) -> None:
        holder = entry.holder
        holder.idle.put(entry)
        holder.address.most.put(holder)
        holder.address.idle.put(holder)
        self._most.put(holder.address)

    def _take(self, entry: _Entry[U]) -> None:
        entry.here = False
        entry.holder.held -= entry.size
        entry.holder.address.held -= entry.size

    def _by_idle(self, entry: _Entry[U]) -> float | None:
        """Return an upload's key among those of its client; what is being written is set aside."""
        if not entry.here:
            return None
        until = standing.written_until(entry.upload)
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


def _by_age(entry: _Entry[U]) -> float | None:
    return entry.upload.last_write if entry.here and not entry.upload.complete else None

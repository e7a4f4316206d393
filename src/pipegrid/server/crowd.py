"""
Who is connected to a storage server, and who makes room for whom.

A connection is a *stranger* until it has shown the server's secret, and *known* from then on. There may be
so many in all, and half of them from one address (an IPv6 address is one of a network's 2^64, which counts as
one). Whoever comes when that is reached is let in all the same, and another one goes:

* the oldest stranger of the address that has most strangers. So who comes from elsewhere than a flood does
  is not its victim, and who comes from the same address has as much time to show the secret as it takes
  the flood to fill all places anew;
* where strangers have no more than an eighth of the places, the known connection of which nothing of use
  has come or gone for longest, if that is at least two seconds. Its client connects again when it needs to.
  So those who know the secret cannot shut out others who do, neither by silence nor by a byte now and then;
* if there is neither, the newcomer goes.

A connection that is cut keeps its descriptor until the reactor's next turn, and in one turn of a burst
hundreds may come. So where many are being closed already (``MAX_CLOSING``), the newcomer goes.

Behind one address there may be a network's worth of clients (NAT), or all of them (Tor, a proxy): each client
of ours has one to three connections to a server, so that half of the thousand serves more than 150 at work at
the same moment, and idle ones do not count. An operator whose clients all come from one address says so
(``--max-per-address``).

Pure: no clock and no transport. What has no use is asked of the guests, and only when somebody must go.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from pipegrid.storage.uploads.standing import address_of

MAX_CONNECTIONS = 1000
MAX_CLOSING = 128
"""Connections that have been cut, and whose descriptors are not free yet."""
QUIET_S = 2.0
_RESERVE = 8  # one place of so many is for strangers, however many known connections there are


class Guest(Protocol):
    """A connection, as far as it matters who makes room for others."""

    def quiet_s(self) -> float:
        """Return for how long nothing of use has come from it or gone to it, in seconds."""


G = TypeVar("G", bound=Guest)


class Crowd(Generic[G]):
    """
    See above.

    Args:
        max_connections: in all.
        max_per_address: from one address; None for half of all.
        max_closing: beyond ``max_connections``, those that were cut and of which ``leave`` was not said yet.
    """

    def __init__(
        self,
        max_connections: int = MAX_CONNECTIONS,
        max_per_address: int | None = None,
        max_closing: int | None = None,
    ) -> None:
        assert max_connections > 0
        self.max_connections = max_connections
        if max_per_address is None:
            max_per_address = max(1, max_connections // 2)
        self.max_per_address = min(max_per_address, max_connections)
        self._max_closing = max_closing
        self._closing: set[G] = set()
        self._places: dict[G, str] = {}
        self._strangers: dict[str, dict[G, None]] = {}  # by address, oldest first
        self._known: dict[str, dict[G, None]] = {}
        self.strangers = 0  # how many have not shown the secret

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<Crowd of {len(self)}, {self.strangers} of them strangers>"

    def enter(self, guest: G, host: str) -> G | None:
        """
        Let a connection in, as a stranger, or not.

        Returns:
            None: there is room. A guest: it has been taken off the list and is to be cut, and it may be
            the newcomer itself.
        """
        place = address_of(host)
        victim: G | None = None
        if self._count(place) >= self.max_per_address:
            victim = self._least((place,), self.max_per_address)
        elif len(self._places) >= self.max_connections:
            victim = self._least(None, self.max_connections)
        else:
            self._add(guest, place)
            return None
        if victim is None or self._closes_enough():
            return guest
        self.leave(victim)
        if self._max_closing is not None:
            self._closing.add(victim)
        self._add(guest, place)
        return victim

    def vouch(self, guest: G) -> None:
        """It has shown the secret."""
        place = self._places.get(guest)
        if place is not None and guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.strangers -= 1
            self._known.setdefault(place, {})[guest] = None

    def leave(self, guest: G) -> None:
        """It has gone; that may be said twice."""
        self._closing.discard(guest)
        place = self._places.pop(guest, None)
        if place is None:
            return
        if guest in self._strangers.get(place, ()):
            _take(self._strangers, place, guest)
            self.strangers -= 1
        else:
            _take(self._known, place, guest)

    def _closes_enough(self) -> bool:
        return self._max_closing is not None and len(self._closing) >= self._max_closing

    def _add(self, guest: G, place: str) -> None:
        self._places[guest] = place
        self._strangers.setdefault(place, {})[guest] = None
        self.strangers += 1

    def _count(self, place: str) -> int:
        return len(self._strangers.get(place, ())) + len(self._known.get(place, ()))

    def _least(self, places: Iterable[str] | None, limit: int) -> G | None:
        """Return who can be spared best, of some addresses or of all; None: nobody."""
        strangers = (
            self._strangers
            if places is None
            else {place: self._strangers.get(place, {}) for place in places}
        )
        most = max(strangers.values(), key=len, default={})
        count = self.strangers if places is None else len(most)
        if count <= limit // _RESERVE:
            known = self._known.keys() if places is None else places
            quiet = _quietest(each for place in known for each in self._known.get(place, ()))
            if quiet is not None:
                return quiet
        return next(iter(most), None)


def _quietest(guests: Iterable[G]) -> G | None:
    best: G | None = None
    longest_s = QUIET_S
    for guest in guests:
        quiet_s = guest.quiet_s()
        if quiet_s >= longest_s:
            best, longest_s = guest, quiet_s
    return best


def _take(groups: dict[str, dict[G, None]], place: str, guest: G) -> None:
    group = groups[place]
    del group[guest]
    if not group:
        del groups[place]

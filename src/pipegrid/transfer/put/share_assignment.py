"""
Decide which share goes to which server, from what is known so far.

Pure: the methods in the past tense record facts; ``assignments`` and ``superfluous`` return decisions. The
optimistic first placement puts share i on the i-th server of the ring without asking any server; the
placement is recomputed only when responses differ from it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import cycle
from typing import Generic, TypeVar

from pipegrid.core.placement import place_shares, servers_of_happiness

T = TypeVar("T", bound=Hashable)

_MAX_TRIES = 2
"""Maximum number of attempts to send one share to one server: one retry if the server lost the share."""


class UploadPlan(Generic[T]):
    """
    The state of one file's placement.

    Args:
        ring: servers in the file's permuted order; no server occurs twice.
        total_shares: n.
        happy: servers of happiness that the caller wants.
        required_shares: k. Fewer shares are never enough, even if ``happy`` is lower.
    """

    def __init__(
        self, ring: Sequence[T], total_shares: int, happy: int, required_shares: int = 1
    ) -> None:
        self.ring = list(ring)
        self.total_shares = total_shares
        self.happy = happy
        self._required_shares = required_shares
        self.stored: dict[int, set[T]] = {}
        """Complete shares and their servers: found, or placed by this put."""
        self.underway: dict[int, set[T]] = {}
        """Servers to which an unfinished share is being sent; more than one if happiness needs it."""
        self._unwritable: set[T] = set()
        self._gone: set[T] = set()
        self._given_up: set[int] = set()
        self._tries: dict[tuple[int, T], int] = {}
        self._barred: set[tuple[int, T]] = set()

    # Facts.

    def barred(self, share_number: int, server: T) -> None:
        """Record that the server has a damaged copy of this share, which the server does not replace."""
        self._barred.add((share_number, server))

    def sending(self, share_number: int, server: T) -> None:
        """Record that a share is being sent."""
        self.underway.setdefault(share_number, set()).add(server)
        self._tries[share_number, server] = self._tries.get((share_number, server), 0) + 1

    def found(self, server: T, share_numbers: Iterable[int]) -> None:
        """Record that the server has these complete shares."""
        for number in share_numbers:
            self.stored.setdefault(number, set()).add(server)
            self._stop(number, server)

    def refused(self, share_number: int, server: T) -> None:
        """Record that the server refused this share; it will not get any other share either."""
        self._unwritable.add(server)
        self._stop(share_number, server)

    def closed(self, server: T) -> None:
        """Record that the server gets no more shares; its existing shares count."""
        self._unwritable.add(server)

    def lost(self, share_number: int, server: T) -> None:
        """Record that the server has lost the unfinished share, which is sent there again at most once."""
        if self._tries.get((share_number, server), 0) >= _MAX_TRIES:
            self._unwritable.add(server)
        self._stop(share_number, server)

    def failed(self, server: T) -> None:
        """Record that the server is gone, and that all shares being sent to it have failed."""
        self._unwritable.add(server)
        self._gone.add(server)
        for number in list(self.underway):
            self._stop(number, server)

    def dropped(self, share_number: int, server: T) -> None:
        """
        Record that a share was dropped because its server is too slow, or because the share is not needed.
        """
        self._given_up.add(share_number)
        self._stop(share_number, server)

    def _stop(self, share_number: int, server: T) -> None:
        homes = self.underway.get(share_number, set())
        homes.discard(server)
        if not homes:
            self.underway.pop(share_number, None)

    # Decisions.

    def first(self) -> dict[int, T]:
        """
        Return the optimistic placement: share i on the i-th server of the ring; after the last server follows
        the first.
        """
        return dict(zip(range(self.total_shares), cycle(self.ring), strict=False))

    def opening(self) -> dict[int, T]:
        """
        Return the placement with which to start, given the responses so far: shares that no server has go to
        the servers that have not failed.
        """
        if self.stored:
            return self.assignments()
        left = [server for server in self.ring if server not in self._gone]
        return dict(zip(range(self.total_shares), cycle(left or self.ring), strict=False))

    def happiness(self) -> int:
        """Return the servers of happiness that the complete shares reach."""
        return servers_of_happiness(self.stored)

    @property
    def is_enough(self) -> bool:
        """Whether the complete shares reach the wanted happiness and suffice to restore the file."""
        return self.happiness() >= self.happy and len(self.stored) >= self._required_shares

    @property
    def missing(self) -> int:
        """The minimum number of further shares that must be stored until ``is_enough`` holds."""
        return max(self.happy - self.happiness(), self._required_shares - len(self.stored))

    def will_be_enough(self, without: Collection[int] = ()) -> bool:
        """
        Return whether the shares will be enough if all pending shares are stored, except those in
        ``without``.
        """
        shares = self.stored.keys() | (self.underway.keys() - set(without))
        return len(shares) >= self._required_shares and self.hoped_happiness(without) >= self.happy

    def hoped_happiness(self, without: Collection[int] = ()) -> int:
        """
        Return the happiness that is reached if all pending shares are stored, except those in ``without``.
        """
        hoped = dict(self.stored)
        for number, homes in self.underway.items():
            if number not in without:
                there = hoped.get(number)
                hoped[number] = homes if there is None else there | homes
        return servers_of_happiness(hoped)

    def assignments(self) -> dict[int, T]:
        """
        Return the shares to send now, each with its server; empty if nothing must be sent.

        Every share should be on a server. A share that is stored or pending on a server is sent to another
        server only if happiness needs it.
        """
        homeless = {
            number
            for number in range(self.total_shares)
            if number not in self.stored
            and number not in self.underway
            and number not in self._given_up
        }
        unhappy = self.hoped_happiness() < self.happy
        if not homeless and not unhappy:
            return {}
        existing: dict[T, set[int]] = {}
        for number, homes in (*self.stored.items(), *self.underway.items()):
            for server in homes:
                existing.setdefault(server, set()).add(number)
        readwrite = [server for server in self.ring if server not in self._unwritable]
        readonly = [s for s in self.ring if s in self._unwritable and s not in self._gone]
        if not readwrite:
            return {}
        placement = place_shares(readwrite, readonly, existing, self.total_shares)
        moves = {
            number: server
            for number, server in sorted(placement.items())
            if (number in homeless or unhappy)
            and number not in existing.get(server, ())
            and server not in self._unwritable
            and self._tries.get((number, server), 0) < _MAX_TRIES
        }
        for number in [
            number for number, server in moves.items() if (number, server) in self._barred
        ]:
            self._move_around(number, moves, readwrite, existing)
        if unhappy and self._barred:
            self._use_idle(moves, readwrite, existing)
        return moves

    def _move_around(
        self, number: int, moves: dict[int, T], readwrite: list[T], existing: dict[T, set[int]]
    ) -> None:
        """Find another server for a share that its assigned server will not take."""

        def fits(share: int, server: T) -> bool:
            return (share, server) not in self._barred and share not in existing.get(server, ())

        here = moves.pop(number)
        for other, there in moves.items():
            if fits(number, there) and fits(other, here):
                moves[other], moves[number] = here, there
                return
        taken = list(moves.values())
        fitting = [server for server in readwrite if fits(number, server)]
        if fitting and number not in self.stored and number not in self.underway:
            moves[number] = min(
                fitting, key=lambda server: len(existing.get(server, ())) + taken.count(server)
            )

    def _use_idle(
        self, moves: dict[int, T], readwrite: list[T], existing: dict[T, set[int]]
    ) -> None:
        """Give idle servers a second copy of some share, if that raises happiness."""
        homes: dict[int, set[T]] = {number: {server} for number, server in moves.items()}
        for server, numbers in existing.items():
            for number in numbers:
                homes.setdefault(number, set()).add(server)
        reached = servers_of_happiness(homes)
        for server in readwrite:
            for number in range(self.total_shares):
                if reached >= self.happy:
                    return
                if (
                    number in moves
                    or server in homes.get(number, ())
                    or (number, server) in self._barred
                    or self._tries.get((number, server), 0) >= _MAX_TRIES
                ):
                    continue
                more = servers_of_happiness({**homes, number: {*homes.get(number, ()), server}})
                if more > reached:
                    reached = more
                    moves[number] = server
                    homes.setdefault(number, set()).add(server)

    def superfluous(self) -> list[int]:
        """
        Return pending shares that some server already has, and whose further copy happiness does not need.

        So a repeated put of a large file sends only what is missing, even when the ring has changed.
        """
        spare: list[int] = []
        for number in sorted(self.underway):
            if number in self.stored and self.hoped_happiness({*spare, number}) >= self.happy:
                spare.append(number)
        return spare

"""
Many small files, and leases, for a server that offers Foolscap beside HTTPS, and takes no bundles.

A request costs such a server of Tahoe-LAFS's 2.6 ms of processor time and more, a small share needs two, and
where many come at once the server's processor is all that they wait for. The same share over Foolscap, three
calls, costs it a third of that. So where a crowd of uploads is under way, and does not end, whole
small shares go over Foolscap, and the leases that a check of many files asks for, one call each. Fewer, and
everything else, do not: over HTTPS a put is one round trip, here it is three.

* **HTTPS has the last word.** What Foolscap does not simply do (the server is not reached, refuses, or
  has an unfinished upload) is asked for again over HTTPS, as if nothing had been sent before.
* **No share is closed before its bytes are acknowledged**: a server would make a share visible that its
  full disk has not taken, and the second try would find it there.
* **No file waits for it.** It is connected when the server has shown that it takes no bundles, and a crowd is
  expected, or has come; a few uploads go over HTTPS meanwhile; if that fails, all stays there. What was
  lost, be it while nobody stored, is connected again in the same way. Leases do wait, for ``SOON_S`` at most:
  the questions that they come with are answered over HTTPS meanwhile.
* **Order.** Two connections have none, so such a store waits for everything before it that concerns the same
  storage index, and everything behind it waits (``order``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, ServerError, ServerTimeout, ServerUnreachable
from pipegrid.flow.concurrency import MANY, SmallFileCapacity
from pipegrid.reactor.deferreds import Timer, Waiters, as_deferred
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.messages import Allocation, LeaseSecrets, Shares, Stored, UploadSecrets

T = TypeVar("T")

CROWD = 8
"""Uploads, or leases, under way at one server. As few as ``flow.concurrency`` allows of a crowd are more."""

AGAIN_S = 60.0
"""After a connection that failed, or was lost, so long HTTPS is all; and so long a crowd is expected."""

SOON_S = 3.0
"""
So long few uploads are under way over HTTPS while the connection is being made, which takes seven round trips
or eight. Where the server had a crowd to work off meanwhile, each of them waited behind part of it: ten
servers on two cores were connected after 5.4 to 6.1 s.
"""


class StoresBeside(StorageServer, Protocol):
    """A server on a connection of its own, which says whether that is up, and whose leases are one call."""

    @property
    def is_connected(self) -> bool:
        """Whether a call would leave at once."""

    @property
    def last_activity_s(self) -> float:
        """When it last answered anything, by the clock."""

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index; it may not tell that there are none."""


Store = Callable[[bytes, Shares, int, UploadSecrets], Deferred[Stored]]
Lease = Callable[[bytes, LeaseSecrets], Deferred[None]]


class FoolscapOffload:
    """
    The other way to one server: its Foolscap, beside its HTTPS.

    Args:
        open_server: makes a server that speaks Foolscap, and closes shares when their bytes are acknowledged;
            called when there is a crowd.
    """

    def __init__(self, clock: IReactorTime, open_server: Callable[[], StoresBeside]) -> None:
        self._clock = clock
        self._open_server = open_server
        self._server: StoresBeside | None = None
        self._under_way = 0
        self._crowd = 0  # how many have come since there was none
        self._expected_since_s: float | None = None
        self._is_up = False
        self._not_before_s: float | None = None
        self._connecting_since_s: float | None = None
        self._held: Waiters[None] = Waiters()  # leases, while it is being connected
        self._patience = Timer(clock, self._let_go)

    @property
    def whole_bytes(self) -> int:
        """How long a share may be to go this way now; 0: it had better not."""
        server = self._usable
        return 0 if server is None or self._under_way < CROWD else server.whole_bytes

    @property
    def last_activity_s(self) -> float:
        """When it last answered anything, by the clock."""
        return -math.inf if self._server is None else self._server.last_activity_s

    @property
    def _usable(self) -> StoresBeside | None:
        """The server, if its connection was made and is up."""
        server = self._server
        return server if self._is_up and server is not None and server.is_connected else None

    def expect(self, objects: int) -> None:
        """So many small objects are about to be stored, here and elsewhere."""
        if objects >= MANY and self._usable is None and self._may_try():
            self._expected_since_s = self._clock.seconds()

    def count(self, upload: Deferred[T]) -> Deferred[T]:
        """Count an upload as under way until it fires."""
        self._began()
        return upload.addBoth(self._ended)

    def watch(self, upload: Deferred[T], takes_bundles: Callable[[], bool]) -> Deferred[T]:
        """Count an upload over HTTPS; its answer has shown what the server takes, and it may be time."""

        def answered(result: T) -> T:
            if not takes_bundles():
                self.offer()
            return result

        return self.count(upload).addCallback(answered)

    def _began(self) -> None:
        self._under_way += 1
        self._crowd += 1

    def _ended(self, result: T) -> T:
        self._under_way -= 1
        if not self._under_way:
            self._crowd = 0
        return result

    def offer(self) -> None:
        """The server takes no bundles: connect, if the crowd is large and nothing speaks against it."""
        expected = self._began_within(self._expected_since_s, AGAIN_S)
        is_crowd = self._under_way >= CROWD and self._crowd >= MANY
        if self._usable is not None or not (expected or is_crowd) or not self._may_try():
            return
        self._expected_since_s = None
        now_s = self._clock.seconds()
        self._not_before_s = now_s + AGAIN_S
        if self._server is None:
            self._server = self._open_server()
        self._connecting_since_s = now_s
        self._patience.set(SOON_S)
        self._server.version().addCallbacks(self._connected, self._failed)

    @property
    def appetite(self) -> SmallFileCapacity:
        """Few uploads, while it is about to be connected and that has not taken long yet."""
        begun = self._expected_since_s, self._connecting_since_s
        soon = any(self._began_within(since_s, SOON_S) for since_s in begun)
        return SmallFileCapacity.FEW if soon else SmallFileCapacity.COUNTED

    @property
    def _is_being_connected(self) -> bool:
        return self._began_within(self._connecting_since_s, SOON_S)

    def _may_try(self) -> bool:
        return self._not_before_s is None or self._clock.seconds() >= self._not_before_s

    def _began_within(self, since_s: float | None, seconds: float) -> bool:
        return since_s is not None and self._clock.seconds() < since_s + seconds

    def _connected(self, _: object) -> None:
        self._is_up = True
        self._connecting_ended()

    def _failed(self, failure: Failure) -> None:
        self._connecting_ended()
        failure.trap(PipegridError, CancelledError)

    def _connecting_ended(self) -> None:
        self._connecting_since_s = None
        self._let_go()

    def _let_go(self) -> None:
        self._patience.stop()
        self._held.fire(None)

    @as_deferred
    async def store(
        self,
        over_https: Store,
        storage_index: bytes,
        shares: Shares,
        share_bytes: int,
        secrets: UploadSecrets,
    ) -> Stored:
        """
        Store whole shares; see the contract.

        Args:
            over_https: stores what does not go this way.
        """
        server = self._usable
        if server is None:  # lost, while this waited for its turn
            return await over_https(storage_index, shares, share_bytes, secrets)
        try:
            first = await server.store_whole(storage_index, shares, share_bytes, secrets)
        except ServerError as error:
            self._note_loss(error)
            return await over_https(storage_index, shares, share_bytes, secrets)
        there = first.allocation.already_have
        done = first.allocation.allocated - first.failed.keys()
        left = {number: data for number, data in shares.items() if number not in done | there}
        if not left:
            return first
        second = await over_https(storage_index, left, share_bytes, secrets)
        have, allocated = second.allocation.already_have, second.allocation.allocated
        return Stored(Allocation((there | have) - done, done | allocated), second.failed)

    def lease(self, over_https: Lease, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """
        Add or renew a lease on every share of an index; it may not be told that there are none.

        Not ordered with anything. To be called where the server does not take bundles, as far as is known.

        Args:
            over_https: asks for what does not go this way.
        """
        self._began()  # first: what is sent depends on how many there are
        return self._lease(over_https, storage_index, lease).addBoth(self._ended)

    @as_deferred
    async def _lease(self, over_https: Lease, storage_index: bytes, lease: LeaseSecrets) -> None:
        if self._crowd >= MANY:
            self.offer()
            if self._is_being_connected:
                await self._held.wait()
        server = self._usable
        if server is not None and self._under_way >= CROWD:
            try:
                await server.lease_listed(storage_index, lease)
            except ServerError as error:
                self._note_loss(error)
            else:
                return
        await over_https(storage_index, lease)

    def _note_loss(self, error: ServerError) -> None:
        if isinstance(error, (ServerUnreachable, ServerTimeout)):
            self._is_up = False
            self._not_before_s = self._clock.seconds() + AGAIN_S

    def disconnect(self) -> Deferred[None]:
        """Give the connection up; fires when it is gone."""
        self._is_up = False
        self._let_go()
        return succeed(None) if self._server is None else self._server.disconnect()

"""
Many small files, and leases, for a server that offers Foolscap in addition to HTTPS, and supports no
bundles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, ServerError, ServerTimeout, ServerUnreachable
from pipegrid.flow.concurrency_limits import MANY, SmallFileCapacity
from pipegrid.reactor.deferreds import Timer, Waiters, as_deferred
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import Allocation, LeaseSecrets, Shares, Stored, UploadSecrets

T = TypeVar("T")

CROWD = 8
"""
Pending uploads, or leases, at one server, from which on Foolscap is used. ``SmallFileCapacity.FEW``
allows fewer than this.
"""

AGAIN_S = 60.0
"""
How long only HTTPS is used after a connection that failed or was lost; and how long an expected crowd
counts.
"""

SOON_S = 3.0
"""
How long only few uploads are pending over HTTPS while the Foolscap connection is being established, which
takes seven or eight round trips. If the server had a crowd to process meanwhile, each round trip would
wait for a part of it: ten servers on two cores were connected after 5.4 to 6.1 s.
"""


class OffloadServer(StorageServer, Protocol):
    """
    A server over a connection of its own. It reports whether it is connected, and renews the leases of
    several files in one call.
    """

    @property
    def is_connected(self) -> bool:
        """Whether a call would be sent at once."""

    @property
    def last_activity_s(self) -> float:
        """When the server last responded, by the clock."""

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the index; may not report that there are none."""


Store = Callable[[bytes, Shares, int, UploadSecrets], Deferred[Stored]]
Lease = Callable[[bytes, LeaseSecrets], Deferred[None]]


class FoolscapOffload:
    """
    The Foolscap connection to one server, used in addition to HTTPS.

    A request costs a Tahoe-LAFS server 2.6 ms of processor time and more, a small share needs two, and
    when many arrive at the same time the server's processor is the bottleneck. The same share over
    Foolscap takes three calls and a third of that time. So while a crowd of uploads is pending and does
    not end, whole small shares go over Foolscap, and so do the leases of a check of many files, one call
    each. Fewer uploads, and all else, do not: over HTTPS a put is one round trip, over Foolscap three.

    * **HTTPS decides.** Requests that fail over Foolscap (the server is not reached, refuses, or has an
      unfinished upload) are sent again over HTTPS, as if nothing had been sent before.
    * **No share is closed before its bytes are acknowledged**: a server would make a share visible whose
      bytes its full disk has not stored, and the retry would find it.
    * **No file waits for the connection.** It is established when the server has shown that it supports
      no bundles, and a crowd is expected or present. Meanwhile a few uploads use HTTPS; if connecting
      fails, all do. A lost connection is established again in the same way. Leases do wait, for
      ``SOON_S`` at most; the questions that accompany them are sent over HTTPS meanwhile.
    * **Order.** Two connections have no common order, so such a store waits for all earlier operations on
      the same storage index, and later ones wait for it (``GbsOrder.alone``).

    Args:
        open_server: creates a server object that uses Foolscap and closes shares when their bytes are
            acknowledged; called when there is a crowd.
    """

    def __init__(self, clock: IReactorTime, open_server: Callable[[], OffloadServer]) -> None:
        self._clock = clock
        self._open_server = open_server
        self._server: OffloadServer | None = None
        self._pending = 0
        self._crowd = 0  # uploads since none was pending
        self._expected_since_s: float | None = None
        self._is_up = False
        self._not_before_s: float | None = None
        self._connecting_since_s: float | None = None
        # leases that wait while the connection is being established
        self._held: Waiters[None] = Waiters()
        self._wait_timer = Timer(clock, self._release_leases)

    @property
    def whole_bytes(self) -> int:
        """The largest share to send over Foolscap now; 0: none."""
        server = self._usable
        return 0 if server is None or self._pending < CROWD else server.whole_bytes

    @property
    def last_activity_s(self) -> float:
        """When the server last responded over Foolscap, by the clock."""
        return -math.inf if self._server is None else self._server.last_activity_s

    @property
    def _usable(self) -> OffloadServer | None:
        """The server, if its connection was established and is up."""
        server = self._server
        return server if self._is_up and server is not None and server.is_connected else None

    def expect(self, objects: int) -> None:
        """Prepare for this number of small objects, which will be stored here and on other servers."""
        if objects >= MANY and self._usable is None and self._may_try():
            self._expected_since_s = self._clock.seconds()

    def count(self, upload: Deferred[T]) -> Deferred[T]:
        """Count an upload as pending until it fires."""
        self._began()
        return upload.addBoth(self._ended)

    def watch(self, upload: Deferred[T], takes_bundles: Callable[[], bool]) -> Deferred[T]:
        """Count an upload over HTTPS; when it succeeds, connect if that is worth it now."""

        def answered(result: T) -> T:
            if not takes_bundles():
                self.offer()
            return result

        return self.count(upload).addCallback(answered)

    def _began(self) -> None:
        self._pending += 1
        self._crowd += 1

    def _ended(self, result: T) -> T:
        self._pending -= 1
        if not self._pending:
            self._crowd = 0
        return result

    def offer(self) -> None:
        """Connect if the crowd is large and no recent attempt failed; the server supports no bundles."""
        expected = self._began_within(self._expected_since_s, AGAIN_S)
        is_crowd = self._pending >= CROWD and self._crowd >= MANY
        if self._usable is not None or not (expected or is_crowd) or not self._may_try():
            return
        self._expected_since_s = None
        now_s = self._clock.seconds()
        self._not_before_s = now_s + AGAIN_S
        if self._server is None:
            self._server = self._open_server()
        self._connecting_since_s = now_s
        self._wait_timer.set(SOON_S)
        self._server.version().addCallbacks(self._connected, self._failed)

    @property
    def small_file_capacity(self) -> SmallFileCapacity:
        """Few uploads while the connection is being established and that has not taken long yet."""
        begun = self._expected_since_s, self._connecting_since_s
        soon = any(self._began_within(since_s, SOON_S) for since_s in begun)
        return SmallFileCapacity.FEW if soon else SmallFileCapacity.COUNTED

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
        self._release_leases()

    def _release_leases(self) -> None:
        self._wait_timer.stop()
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
            over_https: stores the shares that Foolscap has not stored.
        """
        server = self._usable
        if server is None:  # the connection was lost while this call waited for its turn
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
        Add or renew a lease on every share of an index; may not report that there are none.

        Not ordered with other operations. Call this only for a server that is not known to support
        bundles.

        Args:
            over_https: sends the request over HTTPS.
        """
        self._began()  # first, since the choice depends on the number of pending requests
        return self._lease(over_https, storage_index, lease).addBoth(self._ended)

    @as_deferred
    async def _lease(self, over_https: Lease, storage_index: bytes, lease: LeaseSecrets) -> None:
        if self._crowd >= MANY:
            self.offer()
            if self._began_within(self._connecting_since_s, SOON_S):
                await self._held.wait()
        server = self._usable
        if server is not None and self._pending >= CROWD:
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
        """Close the connection; fires when it is closed."""
        self._is_up = False
        self._release_leases()
        return succeed(None) if self._server is None else self._server.disconnect()

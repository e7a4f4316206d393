"""
Many small files and leases over Foolscap, for a server that offers Foolscap in addition to HTTPS, but does
not support bundles.
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
"""Minimum number of pending uploads and leases at one server for which Foolscap is used."""

AGAIN_S = 60.0
"""Minimum time between attempts to connect, and after a loss; how long an expected crowd counts."""

SOON_S = 3.0
"""
The maximum time for which only few uploads use HTTPS while the Foolscap connection is being established,
which takes seven or eight round trips. If the server had many uploads to process meanwhile, each round trip
would wait for some of them: ten servers on two cores were connected after 5.4 to 6.1 s.
"""


class OffloadServer(StorageServer, Protocol):
    """
    A server object with its own connection. It shows whether the connection is up, and renews the leases of
    several files in one call.
    """

    @property
    def is_connected(self) -> bool:
        """Whether the connection is up, so that calls are sent at once."""

    @property
    def last_activity_s(self) -> float:
        """
        When the server last responded, or when a call was sent while no other was unanswered, by the clock.
        """

    def lease_listed(self, storage_index: bytes, lease: LeaseSecrets) -> Deferred[None]:
        """Add or renew a lease on every share of the storage index; need not fail if there are no shares."""


Store = Callable[[bytes, Shares, int, UploadSecrets], Deferred[Stored]]
Lease = Callable[[bytes, LeaseSecrets], Deferred[None]]


class FoolscapOffload:
    """
    The Foolscap connection to one server, used in addition to HTTPS.

    A request costs a Tahoe-LAFS server 2.6 ms of processor time or more, and a small share needs two
    requests. When many arrive at the same time, the server's processor is the bottleneck. The same share over
    Foolscap takes three calls and a third of that time. So while a crowd of uploads (many at the same time)
    is pending and does not end, whole small shares are sent over Foolscap, and so are the leases of a check
    of many files, one call each. Everything else, and fewer uploads, use HTTPS: there a put takes one round
    trip, over Foolscap three.

    * **HTTPS decides.** Requests that fail over Foolscap (the server is not reached, refuses, or has an
      unfinished upload) are sent again over HTTPS, as if nothing had been sent before.
    * **No share is closed before its bytes are acknowledged**: otherwise a server with a full disk would make
      a share visible although bytes are missing, and the retry would find that share.
    * **No file waits for the connection.** It is established when the server has shown that it supports
      no bundles, and a crowd is expected or pending. Meanwhile a few uploads use HTTPS; if connecting
      fails, all do. A lost connection is established again in the same way. Leases do wait for the
      connection, for at most ``SOON_S``; the questions that accompany them are sent over HTTPS meanwhile.
    * **Order.** Two connections have no common order. So a store over Foolscap waits for all earlier
      operations on the same storage index, and later operations wait for the store (``GbsOrder.alone``).

    Args:
        open_server: creates a server object that uses Foolscap and closes shares only after their bytes are
            acknowledged; called when there is a crowd.
    """

    def __init__(self, clock: IReactorTime, open_server: Callable[[], OffloadServer]) -> None:
        self._clock = clock
        self._open_server = open_server
        self._server: OffloadServer | None = None
        self._pending = 0
        self._crowd = 0  # number of uploads and leases that began since none was pending
        self._expected_since_s: float | None = None
        self._is_up = False
        self._not_before_s: float | None = None
        self._connecting_since_s: float | None = None
        # Leases that wait while the connection is being established.
        self._held: Waiters[None] = Waiters()
        self._wait_timer = Timer(clock, self._release_leases)

    @property
    def whole_bytes(self) -> int:
        """The largest share to send over Foolscap now; 0: send all shares over HTTPS."""
        server = self._usable
        return 0 if server is None or self._pending < CROWD else server.whole_bytes

    @property
    def last_activity_s(self) -> float:
        """``last_activity_s`` of the Foolscap server object; minus infinity if there is none."""
        return -math.inf if self._server is None else self._server.last_activity_s

    @property
    def _usable(self) -> OffloadServer | None:
        """The server object while its connection is up; otherwise None."""
        server = self._server
        return server if self._is_up and server is not None and server.is_connected else None

    def expect(self, objects: int) -> None:
        """Prepare for this number of small objects, which will be stored here and on other servers."""
        if objects >= MANY and self._usable is None and self._may_try():
            self._expected_since_s = self._clock.seconds()

    def count(self, upload: Deferred[T]) -> Deferred[T]:
        """Count an upload as pending until its Deferred fires."""
        self._began()
        return upload.addBoth(self._ended)

    def watch(self, upload: Deferred[T], takes_bundles: Callable[[], bool]) -> Deferred[T]:
        """
        Count an upload over HTTPS as pending; after its success, connect over Foolscap if there is a crowd.
        """

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
        """
        Connect if a crowd is expected or pending, and if ``AGAIN_S`` have passed since the last attempt or
        failure. The caller knows that the server supports no bundles.
        """
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
        """
        ``FEW`` for at most ``SOON_S`` after connecting began or a crowd was expected; otherwise ``COUNTED``.
        """
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
        Store whole shares over Foolscap; see ``StorageServer.store_whole``.

        Args:
            over_https: stores the shares that were not stored over Foolscap.
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
        Add or renew a lease on every share of a storage index; need not fail if there are no shares.

        Leases are not ordered with other operations. Call this only for a server that is not known to support
        bundles.

        Args:
            over_https: sends the request over HTTPS.
        """
        self._began()  # count first: the choice depends on the number
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
        """Close the Foolscap connection; fires when it is closed."""
        self._is_up = False
        self._release_leases()
        return succeed(None) if self._server is None else self._server.disconnect()

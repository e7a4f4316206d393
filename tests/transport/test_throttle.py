"""Buffers of limited connections, which fit the rate that is in effect."""

from __future__ import annotations

import socket
from typing import Any

from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.flow.rate_timetable import Rates, RateTimetable
from pipegrid.transport.throttle import Throttle, Throttled

SLOW = 20_000
USUAL_BYTES = 64 << 10


class SocketTransport(StringTransport):
    """A transport with the buffers of a real socket."""

    bufferSize = USUAL_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.socket, self.other = socket.socketpair()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Its producer is not asked for anything here."""


class BuffersTests(SynchronousTestCase):
    """A timetable with a limit for some minutes of the week."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.minute = 0
        self.transport = SocketTransport()
        self.addCleanup(self.transport.socket.close)
        self.addCleanup(self.transport.other.close)
        self.usual_bytes = self.kept_bytes()

    def kept_bytes(self) -> int:
        """Return the size of the kernel's receive buffer."""
        return self.transport.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    def connect(self, *rates: int | None) -> Throttled:
        """Connect with these rates, each for a minute, the first of which begins now."""
        table = RateTimetable(tuple(range(len(rates))), tuple(Rates(each, each) for each in rates))
        throttle = Throttle(self.clock, table, lambda: self.minute)
        connection = Throttled(throttle, Protocol())
        connection.makeConnection(self.transport)
        return connection

    def next_minute(self, connection: Throttled) -> None:
        """Let the next rate begin, and receive something."""
        self.minute += 1
        self.clock.advance(60)
        connection.dataReceived(b"x")

    def test_a_limit_that_begins_and_ends(self) -> None:
        """Without one the buffers are as ever; with one they keep a quarter of a second; then as before."""
        connection = self.connect(None, SLOW, None, 10 * SLOW)
        self.assertEqual(
            (self.kept_bytes(), self.transport.bufferSize), (self.usual_bytes, USUAL_BYTES)
        )
        self.next_minute(connection)
        self.assertLess(self.kept_bytes(), self.usual_bytes)
        self.assertEqual(self.transport.bufferSize, SLOW // 4)
        self.next_minute(connection)
        self.assertEqual(
            (self.kept_bytes(), self.transport.bufferSize), (self.usual_bytes, USUAL_BYTES)
        )
        self.next_minute(connection)
        self.assertEqual(self.transport.bufferSize, 10 * SLOW // 4)

    def test_a_reader_that_waits(self) -> None:
        """Reads again soon after a limit has ended, although it would have had to wait for minutes."""
        connection = self.connect(100, None)
        connection.dataReceived(b"x" * 100_000)
        self.assertEqual(self.transport.producerState, "paused")
        self.clock.advance(30)
        self.assertEqual(self.transport.producerState, "paused")
        self.minute = 1
        self.clock.pump([1.0] * 6)
        self.assertEqual(self.transport.producerState, "producing")
        self.assertEqual(self.clock.getDelayedCalls(), [])

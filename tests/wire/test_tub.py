"""The connection of somebody who calls: what the other side may ask of it."""

from __future__ import annotations

from typing import Any

from foolscap.referenceable import TubRef
from misc.attack.foolscap import call, token, value
from twisted.internet.task import Clock

from pipegrid.wire import foolscap_broker
from pipegrid.wire.banana_receiver import PING
from pipegrid.wire.foolscap_broker import MAX_UNREAD, MAX_UNSENT_BYTES, PONGS_APART_S, CallersBroker
from tests.wire.test_broker import DECISION, BrokerTestCase


class CallersBrokerTests(BrokerTestCase):
    """Questions without end, of somebody who reads no answer."""

    def make(self) -> CallersBroker:
        self.unsent = 0
        self.time = Clock()
        self.patch(foolscap_broker, "unsent_bytes", lambda _: self.unsent)
        broker = CallersBroker(TubRef("a" * 32), DECISION, bounds=self.bounds)
        self.patch(broker, "seconds", self.time.seconds)
        return broker

    def ask(self, method: bytes, argument: Any, times: int) -> None:
        """Call the object so often, until it refuses."""
        for number in range(1, times + 1):
            if not self.broker.connectionAbandoned:
                self.receive(call(number, 1, method, value(argument)))

    def test_pings(self) -> None:
        """Of many that come at once one is answered, and again a while later."""
        self.receive(token(PING) * 1000)
        self.assertEqual(len(self.transport.written), 1)
        self.time.advance(PONGS_APART_S)
        self.receive(token(PING) * 1000)
        self.assertEqual(len(self.transport.written), 2)

    def test_calls(self) -> None:
        """Answers that nobody reads have an end, whether the calls make sense or not."""
        for method in (b"echo", b"unknown"):
            self.setUp()
            self.unsent = MAX_UNSENT_BYTES + 1
            self.ask(method, b"x", MAX_UNREAD)
            self.assertFalse(self.broker.connectionAbandoned)
            self.ask(method, b"x", 1)
            self.assert_refused("reads none of the answers")

    def test_a_busy_line(self) -> None:
        """Who reads may ask as often as it likes, also while much of our own is waiting to be sent."""
        self.unsent = MAX_UNSENT_BYTES
        self.ask(b"echo", b"x", MAX_UNREAD + 1)
        self.unsent = 0
        self.ask(b"echo", b"x", 1)
        self.unsent = MAX_UNSENT_BYTES + 1
        self.ask(b"echo", b"x", MAX_UNREAD)
        self.assertFalse(self.broker.connectionAbandoned)

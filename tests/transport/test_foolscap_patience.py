"""How long the answer to a message of megabytes is waited for over Foolscap, where it comes as a whole."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import ServerTimeout
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets
from tests.scratch import scratch_path
from tests.transport.contract import SI
from tests.transport.foolscap_world import FoolscapWorld

SECRETS = SlotSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"w" * 32)
MEGABYTE = 10**6
MORE_S = 500.0
"""What a megabyte may take on the slowest of lines."""


class PatienceTests(SynchronousTestCase):
    """A server from which nothing is heard any more."""

    def setUp(self) -> None:
        self.world = FoolscapWorld(self, scratch_path(self), 0.05)
        self.server = self.world.connect()
        self.server.version()
        self.world.settle()
        self.world.connector.wires[-1].silent = True
        self.limit_s = self.world.settings.timeout_s

    def test_a_long_write(self) -> None:
        """A megabyte of a mutable share may be on its way for minutes."""
        change = ShareChange((), ((0, bytes(MEGABYTE)),), None)
        self.assert_given_up_after(
            self.limit_s + MORE_S, self.server.read_test_write(SI, SECRETS, {0: change})
        )

    def test_a_long_read(self) -> None:
        """So may one that was asked for."""
        self.assert_given_up_after(
            self.limit_s + MORE_S, self.server.read_slot_share(SI, 0, 0, MEGABYTE)
        )

    def test_a_small_question(self) -> None:
        """That is answered within a minute, or not at all."""
        self.assert_given_up_after(
            self.limit_s, self.server.read_test_write(SI, SECRETS, {}, [(0, 57)])
        )

    def assert_given_up_after(self, limit_s: float, waiting: Deferred[Any]) -> None:
        """Not before, and not much later."""
        self.world.clock.advance(limit_s - 5)
        self.assertNoResult(waiting)
        self.world.clock.advance(10)
        self.world.settle()
        self.failureResultOf(waiting, ServerTimeout)

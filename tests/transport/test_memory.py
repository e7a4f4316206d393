"""The server in memory: the contract, and what it offers to tests."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NoSuchShare, ServerUnreachable
from pipegrid.transport.interface import StorageServer
from tests.transport.contents import MemoryStorage
from tests.transport.contract import IDENTITY, SECRETS, SI, StorageServerContract
from tests.transport.memory import MemoryServer


class MemoryContractTests(StorageServerContract, SynchronousTestCase):
    """The contract, answered at once."""

    def setUp(self) -> None:
        self.storage = MemoryStorage()
        super().setUp()

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        self.storage.capacity_bytes = capacity_bytes
        return MemoryServer(IDENTITY, self.storage)


class DelayedMemoryContractTests(MemoryContractTests):
    """The contract, with every answer coming later."""

    def setUp(self) -> None:
        self.clock = Clock()
        super().setUp()

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        self.storage.capacity_bytes = capacity_bytes
        return MemoryServer(IDENTITY, self.storage, self.clock, 0.1)

    def settle(self) -> None:
        self.clock.advance(0.1)


class HooksTests(SynchronousTestCase):
    """Failures to order."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.server = MemoryServer(IDENTITY, clock=self.clock)

    def test_the_next_call_fails(self) -> None:
        """A failure is for one call of the operation named, and that call does nothing."""
        error = ServerUnreachable("gone; try again")
        self.server.fail_next(error, "allocate")
        self.server.fail_next(error)
        self.failureResultOf(self.server.version(), ServerUnreachable)
        self.successResultOf(self.server.version())
        self.failureResultOf(self.server.allocate(SI, {0}, 1, SECRETS), ServerUnreachable)
        self.assertEqual(self.server.storage.uploads, {})
        self.successResultOf(self.server.allocate(SI, {0}, 1, SECRETS))
        self.assertEqual([name for name, _ in self.server.calls][-2:], ["allocate"] * 2)

    def test_a_server_hangs(self) -> None:
        """A hanging operation stays unanswered until it is cancelled; others are answered."""
        self.server.hang("read")
        hanging = self.server.read(SI, 0, 0, 1)
        self.assertNoResult(hanging)
        self.successResultOf(self.server.version())
        self.successResultOf(self.server.disconnect())
        self.failureResultOf(hanging)
        self.server.hang("read", hanging=False)
        self.failureResultOf(self.server.read(SI, 0, 0, 1), NoSuchShare)

    def test_answers_take_time(self) -> None:
        """The deed is done at once, the answer comes later; cancelling leaves no timer behind."""
        self.server.delay_s = 2.0
        answer = self.server.allocate(SI, {0}, 1, SECRETS)
        self.assertEqual(len(self.server.storage.uploads), 1)
        self.clock.advance(1.9)
        self.assertNoResult(answer)
        self.clock.advance(0.1)
        self.assertEqual(self.successResultOf(answer).allocated, {0})
        failing = self.server.read(SI, 0, 0, 1)
        failing.cancel()
        self.failureResultOf(failing)
        self.assertEqual(self.clock.getDelayedCalls(), [])

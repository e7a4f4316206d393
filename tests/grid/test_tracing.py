"""Tracing changes nothing but the trace."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NoSuchShare
from pipegrid.grid.server_tracing import TracedServer, TracedWorkers
from pipegrid.reactor.trace import Tracer
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transport.interface import StorageServer
from tests.transport.contents import MemoryStorage
from tests.transport.contract import IDENTITY, SECRETS, SI, StorageServerContract
from tests.transport.memory import MemoryServer


class TracedServerContractTests(StorageServerContract, SynchronousTestCase):
    """A traced server keeps the contract of the server that it wraps."""

    def setUp(self) -> None:
        self.storage = MemoryStorage()
        self.tracer = Tracer(Clock().seconds)
        super().setUp()

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        self.storage.capacity_bytes = capacity_bytes
        return TracedServer(MemoryServer(IDENTITY, self.storage), self.tracer)


class SpanTests(SynchronousTestCase):
    """What is in the trace."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.tracer = Tracer(self.clock.seconds)

    def spans(self) -> list[tuple[object, ...]]:
        return [
            (event["name"], event["dur"], event["args"])
            for event in self.tracer.events()
            if event["ph"] == "X"
        ]

    def test_each_request_is_a_span_as_long_as_its_answer_takes(self) -> None:
        """Name, length, facts, and the class of the error if there was one."""
        memory = MemoryServer(IDENTITY, clock=self.clock, delay_s=0.5)
        server = TracedServer(memory, self.tracer)
        allocated = server.allocate(SI, {2, 1}, 10, SECRETS)
        read = server.read(SI, 3, 4, 5)
        self.clock.advance(0.5)
        self.successResultOf(allocated)
        self.failureResultOf(read, NoSuchShare)
        facts = {"share": 3, "offset": 4, "bytes": 5, "error": "NoSuchShare"}
        self.assertEqual(
            self.spans(),
            [
                ("allocate", 500_000.0, {"shares": [1, 2], "bytes": 10}),
                ("read", 500_000.0, facts),
            ],
        )

    def test_each_job_is_a_span(self) -> None:
        """Also one that fails, and one that runs at once."""
        workers = TracedWorkers(InlineWorkers(), self.tracer)
        self.assertEqual(self.successResultOf(workers.run(sum, [1, 2])), 3)
        self.failureResultOf(workers.run_if_large(7, int, "x"), ValueError)
        names = [(name, facts) for name, _, facts in self.spans()]
        self.assertEqual(names, [("sum", {}), ("int", {"bytes": 7})])
        self.successResultOf(workers.stop())

"""Pipelines around the calls of real protocols, all of which fail: Foolscap, Perspective Broker, AMP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foolscap.api import Referenceable, Tub
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory
from twisted.protocols import amp
from twisted.python.failure import Failure
from twisted.spread import pb
from twisted.trial.unittest import TestCase

from pipegrid import AutoWindow, Pipeline, PipelineStopped, RemoteCallError
from pipegrid.flow.window import Window

if TYPE_CHECKING:

    class Mixin(TestCase):
        """What the classes that use it are."""
else:
    Mixin = object

CALLS = 40
HOST = "127.0.0.1"
DOCS = Path(__file__).parent.parent.parent / "docs"

WINDOWS: dict[str, Callable[[], int | Window]] = {
    "narrow": lambda: 1,
    "wide": lambda: 1 << 20,
    "measured": lambda: AutoWindow(maximum_bytes=1 << 20),
}


class DiskFull(Exception):
    """What the methods of the servers raise."""


class DiskFullToo(pb.Error):
    """The same, as Perspective Broker's servers raise what their clients shall see."""


class FoolscapShare(Referenceable):  # type: ignore[misc]
    """A share that takes no writes."""

    def remote_write(self, offset: int, piece: bytes = b"") -> None:
        """Fail."""
        raise DiskFull(f"no space for {offset}")


class BrokerShare(pb.Root):
    """A share that takes no writes."""

    def remote_write(self, offset: int) -> None:
        """Fail, as PB's clients can know."""
        raise DiskFullToo(f"no space for {offset}")


class Write(amp.Command):
    """A write that fails as the client knows."""

    arguments = [(b"offset", amp.Integer())]
    errors = {DiskFull: b"DISK_FULL"}


class WriteOddly(amp.Command):
    """A write that fails as no client was told."""

    arguments = [(b"offset", amp.Integer())]


class AmpShare(amp.AMP):
    """A share that takes no writes."""

    @Write.responder
    def write(self, offset: int) -> None:
        """Fail."""
        raise DiskFull(f"no space for {offset}")

    @WriteOddly.responder
    def write_oddly(self, offset: int) -> None:
        """Fail."""
        raise ValueError(f"no space for {offset}")


class FailingCalls(Mixin):
    """What must hold whoever calls; ``call`` answers with a Deferred that fails."""

    call: Callable[[int], Deferred[Any]]
    raised: type[Exception]
    trapped: Any

    def run_all(self, pipeline: Pipeline) -> Deferred[None]:
        """Start all calls at once, as far as the pipeline lets, and fire as ``flush`` does."""
        self.waits = [pipeline.add(100, self.call, number) for number in range(CALLS)]
        for wait in self.waits:
            wait.addErrback(lambda _: None)
        return pipeline.flush()

    async def check_window(self, make: Callable[[], int | Window]) -> None:
        """Add calls until one has failed, and look at all that can be seen of it then."""
        pipeline = Pipeline(make(), reactor)
        with self.assertRaises(self.raised) as caught:
            for number in range(CALLS):
                await pipeline.add(100, self.call, number)
            await pipeline.flush()
        self.assertIn("no space for", str(caught.exception))
        await pipeline.abort()
        self.assertTrue(pipeline.stopped)
        self.assertEqual(pipeline.calls_in_flight, 0)
        self.assertGreater(pipeline.failure_count, 0)
        with self.assertRaises(PipelineStopped) as later:
            await pipeline.flush()
        self.assertIsInstance(later.exception.__cause__, self.raised)
        self.assertIn("no space for", str(later.exception))

    async def test_a_narrow_window(self) -> None:
        """One call at a time: the first that fails is the last."""
        await self.check_window(WINDOWS["narrow"])

    async def test_a_wide_window(self) -> None:
        """All calls are on their way when the first has failed."""
        await self.check_window(WINDOWS["wide"])

    async def test_a_measured_window(self) -> None:
        """What fails is given to it as abandoned."""
        await self.check_window(WINDOWS["measured"])

    async def test_all_are_counted(self) -> None:
        """In a wide window all of them fail; ``flush`` fails when the last has."""
        pipeline = Pipeline(WINDOWS["wide"]())
        with self.assertRaises(self.raised):
            await self.run_all(pipeline)
        self.assertEqual(pipeline.failure_count, CALLS)
        for failure in pipeline.failures:
            self.assertIsInstance(failure.value, self.raised)
            self.assertIs(failure.check(self.trapped), self.trapped)
            self.assertIn("no space for", failure.getErrorMessage())
            self.assertRaises(self.raised, failure.raiseException)

    async def test_every_waiter_fires(self) -> None:
        """Those that wait for room, and those that wait for the end; one hears of the failure itself."""
        for make in WINDOWS.values():
            pipeline = Pipeline(make(), reactor)
            outcomes: list[Failure] = []
            waits = [pipeline.add(1 << 20, self.call, number) for number in range(CALLS)]
            waits += [pipeline.flush() for _ in range(5)]
            for wait in waits:
                wait.addErrback(outcomes.append)
            await gatherResults(waits)
            self.assertEqual(len(outcomes), len(waits))
            own = [outcome for outcome in outcomes if not outcome.check(PipelineStopped)]
            self.assertEqual(len(own), 1)
            for wait in waits:
                wait.cancel()
            await pipeline.abort()

    async def test_abort_while_all_fail(self) -> None:
        """It fires, all that wait fail, and no wait is left that cannot be cancelled."""
        pipeline = Pipeline(WINDOWS["narrow"]())
        flushed = self.run_all(pipeline)
        await self.call(0).addErrback(lambda _: None)  # its answer comes after the others'
        waits = [*self.waits, flushed.addErrback(lambda _: None)]
        await pipeline.abort()
        await gatherResults(waits)
        for wait in waits:
            wait.cancel()


class FoolscapTests(FailingCalls, TestCase):
    """Foolscap, over a connection of its own to this process; its failures hold text for exceptions."""

    raised = RemoteCallError
    trapped = f"{__name__}.DiskFull"

    async def setUp(self) -> None:  # type: ignore[override]
        server, client = Tub(), Tub()
        for tub in (server, client):
            tub.setOption("logLocalFailures", False)
            tub.startService()
            self.addCleanup(tub.stopService)
        port = await TCP4ServerEndpoint(reactor, 0, interface=HOST).listen(Factory())
        number = port.getHost().port
        await port.stopListening()
        server.listenOn(f"tcp:{number}:interface={HOST}")
        server.setLocation(f"tcp:{HOST}:{number}")
        share = await client.getReference(server.registerReference(FoolscapShare()))
        self.share = share
        self.call = lambda number: share.callRemote("write", number)

    async def test_a_failure_that_is_no_reason_to_stop(self) -> None:
        """The lines of docs/how-to-pipeline.md, as they stand."""
        guide = (DOCS / "how-to-pipeline.md").read_text("utf-8")
        section = guide.split("## Treat failures\n")[1].split("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("    ") or not line]
        names: dict[str, Any] = {
            "Deferred": Deferred,
            "Failure": Failure,
            "offset": 7,
            "piece": b"seven",
            "pipeline": Pipeline(),
            "refused": [],
            "share": self.share,
        }
        body = "\n".join(lines).replace("storage.Refused", f"{__name__}.DiskFull")
        exec(f"async def example():\n{body}\n    await pipeline.flush()\n", names)
        await names["example"]()
        self.assertEqual(names["refused"], [7])

    async def test_what_is_known(self) -> None:
        """The error says what the server said: the class, the text and the failure itself."""
        pipeline = Pipeline()
        await pipeline.add(1, self.call, 7)
        with self.assertRaises(RemoteCallError) as caught:
            await pipeline.flush()
        self.assertEqual(caught.exception.remote_type, f"{__name__}.DiskFull")
        self.assertEqual(str(caught.exception), f"no space for 7 ({__name__}.DiskFull)")
        self.assertIn("raise DiskFull", caught.exception.remote_traceback)


class PerspectiveBrokerTests(FailingCalls, TestCase):
    """Perspective Broker, over TCP; the value of its failures is a string."""

    raised = pb.RemoteError
    trapped = DiskFullToo

    async def setUp(self) -> None:  # type: ignore[override]
        factory = pb.PBServerFactory(BrokerShare())
        port = await TCP4ServerEndpoint(reactor, 0, interface=HOST).listen(factory)
        self.addCleanup(port.stopListening)
        client = pb.PBClientFactory()
        await TCP4ClientEndpoint(reactor, HOST, port.getHost().port).connect(client)
        share = await client.getRootObject()
        gone: Deferred[None] = Deferred()
        share.notifyOnDisconnect(lambda _: gone.callback(None))
        self.addCleanup(lambda: gone)
        self.addCleanup(client.disconnect)
        self.call = lambda number: share.callRemote("write", number)


class AmpTests(FailingCalls, TestCase):
    """AMP, over TCP, with an error that both sides know."""

    raised = DiskFull
    trapped = DiskFull

    async def setUp(self) -> None:  # type: ignore[override]
        port = await TCP4ServerEndpoint(reactor, 0, interface=HOST).listen(
            Factory.forProtocol(AmpShare)
        )
        self.addCleanup(port.stopListening)
        self.client = await connectProtocol(
            TCP4ClientEndpoint(reactor, HOST, port.getHost().port), amp.AMP()
        )
        self.addCleanup(self.client.transport.loseConnection)
        self.call = lambda number: self.client.callRemote(Write, offset=number)

    async def test_an_unknown_error(self) -> None:
        """The client learns no more than that it failed."""
        pipeline = Pipeline()
        for number in range(CALLS):
            pipeline.add(1, self.client.callRemote, WriteOddly, offset=number).addErrback(
                lambda _: None
            )
        with self.assertRaises(amp.UnknownRemoteError):
            await pipeline.flush()
        self.assertEqual(pipeline.failure_count, CALLS)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), CALLS)


def failing(failure: Failure) -> Deferred[None]:
    """Return a Deferred that fails so in the reactor's next turn."""
    answer: Deferred[None] = Deferred()
    reactor.callLater(0, answer.errback, failure)
    return answer


class NoTracebackTests(FailingCalls, TestCase):
    """A failure that was never raised."""

    raised = DiskFull
    trapped = DiskFull

    def setUp(self) -> None:
        self.call = lambda number: failing(Failure(DiskFull(f"no space for {number}")))


class NoExceptionTests(FailingCalls, TestCase):
    """A failure that holds no exception at all."""

    raised = RemoteCallError
    trapped = RemoteCallError

    def setUp(self) -> None:
        self.call = lambda number: failing(Failure(f"no space for {number}"))

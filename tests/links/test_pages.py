"""Bulk data goes through a relay as pages: the same bytes, in order, and all pipes are closed at the end."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.testing.link_relay import (
    BULK_BYTES,
    Copied,
    LinkShape,
    PageReader,
    Pages,
    Pipes,
    RelayFactory,
    SharedLink,
)

DATA = random.Random(1).randbytes(100_000)
MUCH = random.Random(2).randbytes(5_000_000)


class Connection:
    """One end of a pair of sockets, as far as a relay uses Twisted's."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.connected = True
        self.dataBuffer = b""
        self._tempDataBuffer: list[bytes] = []
        self.copied: list[bytes] = []

    def fileno(self) -> int:
        return self.end.fileno()

    def writeSomeData(self, data: Any) -> int | Exception:
        try:
            return self.end.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            return error

    def doRead(self) -> str:
        try:
            self.copied.append(self.end.recv(1 << 20))
        except BlockingIOError:
            return "nothing"
        return "copied"


class Case(SynchronousTestCase):
    """Two pairs of sockets, with the relay in their middle."""

    def setUp(self) -> None:
        self.assertTrue(hasattr(os, "splice"), "these tests need Linux")
        self.pipes = Pipes()
        self.pipes.join()
        sockets = [*socket.socketpair(), *socket.socketpair()]
        for each in sockets:
            each.setblocking(False)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self.addCleanup(each.close)
        self.sender, self.receiver = sockets[0], sockets[3]
        self.source, self.sink = Connection(sockets[1]), Connection(sockets[2])

    def tearDown(self) -> None:
        self.pipes.leave()
        self.assertEqual(len(self.pipes), 0)

    def pages(self, data: bytes) -> Pages:
        """Return these bytes in a pipe."""
        pipe = self.pipes.take()
        assert pipe is not None
        self.assertEqual(os.write(pipe[1], data), len(data))
        return Pages(self.pipes, pipe, len(data))

    def received(self) -> bytes:
        """Return what the receiver has by now."""
        try:
            return self.receiver.recv(1 << 20)
        except BlockingIOError:
            return b""


class DeliveryTests(Case):
    """Both kinds of data are delivered alike."""

    def each(self) -> list[Copied | Pages]:
        """Return the same bytes in both ways."""
        return [Copied(DATA), self.pages(DATA)]

    def test_all_at_once_and_by_the_piece(self) -> None:
        """What is asked for, no more, in order; what is left says its length."""
        for steps in ((100_000,), (1, 70_000, 29_998, 1)):
            for data in self.each():
                left = len(DATA)
                found = b""
                for step in steps:
                    self.assertEqual(len(data), left)
                    self.assertEqual(bytes(data.deliver(step, self.sink)), b"")
                    left -= step
                    found += self.received()
                self.assertEqual((len(data), found), (0, DATA))

    def test_what_is_not_sent_is_returned(self) -> None:
        """Because there is no socket yet, it is lost, or something waits there."""
        self.assertEqual(self.returned(None), [DATA] * 2)
        for waiting in ("dataBuffer", "_tempDataBuffer"):
            setattr(self.sink, waiting, b"x")
            self.assertEqual(self.returned(self.sink), [DATA] * 2)
            setattr(self.sink, waiting, b"")
        self.sink.connected = False
        self.assertEqual(self.returned(self.sink), [DATA] * 2)
        self.sink.connected = True
        self.receiver.close()
        self.assertEqual(self.returned(self.sink), [DATA] * 2)

    def returned(self, sink: Connection | None) -> list[bytes]:
        """Return what comes back of each, delivered in two parts."""
        return [
            bytes(data.deliver(10, sink)) + bytes(data.deliver(len(DATA) - 10, sink))
            for data in self.each()
        ]

    def test_a_socket_that_is_full(self) -> None:
        """It has a part, and the rest is returned."""
        for make in (Copied, self.pages):
            self.sink.end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            data = make(DATA)
            rest = bytes(data.deliver(len(DATA), self.sink))
            self.assertTrue(rest)
            found = b""
            while piece := self.received():
                found += piece
            self.assertEqual(found + rest, DATA)

    def test_cut(self) -> None:
        """The end is forgotten; the beginning is as it was."""
        for data in self.each():
            data.cut(40_000)
            self.assertEqual(len(data), 60_000)
            data.deliver(50_000, self.sink)
            data.cut(10_000)
            self.assertEqual((len(data), self.received()), (0, DATA[:50_000]))


class PipesTests(Case):
    """Bounded, used again, and closed."""

    def test_the_limit(self) -> None:
        """No more than that; and no more than this process may have."""
        pipes = Pipes(limit=2)
        pipes.join()
        taken = [pipes.take() for _ in range(3)]
        self.assertEqual((taken[2], len(pipes)), (None, 2))

        def none_left(_flags: int) -> tuple[int, int]:
            raise OSError(24, "Too many open files")

        pipes.give_back(taken[0] or self.fail())
        self.patch(os, "pipe2", none_left)
        self.assertEqual([pipes.take(), pipes.take()], [taken[0], None])
        pipes.leave()
        for pipe in taken[:2]:
            pipes.give_back(pipe or self.fail())
        self.assertEqual(len(pipes), 0)

    def test_one_that_is_not_empty_is_not_used_again(self) -> None:
        """Its bytes would come before those of the next."""
        data = self.pages(DATA)
        data.cut(len(DATA))
        self.assertEqual(len(self.pipes), 0)
        again = self.pages(b"next")
        again.deliver(4, self.sink)
        self.assertEqual((self.received(), len(self.pipes)), (b"next", 1))

    def test_nothing_is_kept_after_the_last_connection(self) -> None:
        """Idle pipes are closed then, and those in use when they are given back."""
        data = self.pages(DATA)
        self.pipes.give_back(self.pipes.take() or self.fail())
        self.pipes.join()
        self.pipes.leave()
        self.assertEqual(len(self.pipes), 2)
        self.pipes.leave()
        self.assertEqual(len(self.pipes), 1)
        data.deliver(len(DATA), None)
        self.assertEqual(len(self.pipes), 0)
        self.pipes.join()

    def test_without_splice(self) -> None:
        """There are no pipes then."""
        self.patch(os, "splice", None)
        del os.splice
        self.assertIs(Pipes().take(), None)


class ReaderTests(Case):
    """Bulk data is read as pages, all else as it always was."""

    def setUp(self) -> None:
        super().setUp()
        self.got: list[Pages] = []
        PageReader(self.source, self.pipes, 50_000, self.got.append)
        self.reader: PageReader = self.source.doRead.__self__  # type: ignore[attr-defined]

    def test_bulk(self) -> None:
        """After a long read come pages, until there is little."""
        self.sender.send(DATA[:100])
        self.assertEqual(self.source.doRead(), "copied")
        self.reader.note(100)
        self.sender.send(DATA)
        self.reader.note(BULK_BYTES)
        self.source.doRead()
        self.source.doRead()
        self.assertEqual([len(each) for each in self.got], [50_000, 50_000])
        self.sender.send(b"little")
        self.source.doRead()
        self.sender.send(b"copied again")
        self.source.doRead()
        for each in self.got:
            each.deliver(len(each), self.sink)
        self.assertEqual(self.received(), DATA + b"little")
        self.assertEqual(self.source.copied, [DATA[:100], b"copied again"])

    def test_nothing_and_the_end(self) -> None:
        """Are told as Twisted tells them."""
        self.reader.note(BULK_BYTES)
        self.assertEqual(self.source.doRead(), "nothing")
        self.sender.close()
        self.reader.note(BULK_BYTES)
        self.source.doRead()
        self.assertEqual((self.source.copied, self.got), ([b""], []))

    def test_no_pipe_left(self) -> None:
        """Then it is copied."""
        self.patch(self.pipes, "_limit", 0)
        self.reader.note(BULK_BYTES)
        self.sender.send(DATA[:10])
        self.assertEqual(self.source.doRead(), "copied")


class Ends(Protocol):
    """Sends much, counts, and can be waited for."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.wanted = -1
        self.complete: Deferred[None] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        if len(self.got) == self.wanted:
            self.complete.callback(None)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.callback(None)


class RelayTests(TestCase):
    """Through real sockets."""

    timeout = 20

    async def connect(self) -> tuple[Ends, Ends, SharedLink]:
        """Return both ends of a connection through a relay."""
        loop: Any = reactor
        link = SharedLink(loop, LinkShape(0.004))
        accepted: Deferred[Ends] = Deferred()

        def accept(_address: object) -> Ends:
            end = Ends()
            loop.callLater(0, accepted.callback, end)
            return end

        factory = Factory()
        factory.buildProtocol = accept  # type: ignore[method-assign, assignment]
        ports = [loop.listenTCP(0, factory, interface="127.0.0.1")]
        target = TCP4ClientEndpoint(loop, "127.0.0.1", ports[0].getHost().port)
        ports.append(loop.listenTCP(0, RelayFactory(link, target), interface="127.0.0.1"))
        for port in ports:
            self.addCleanup(port.stopListening)
        relay = TCP4ClientEndpoint(loop, "127.0.0.1", ports[1].getHost().port)
        near = Ends()
        await relay.connect(Factory.forProtocol(lambda: near))
        return near, await accepted, link

    async def test_much_both_ways(self) -> None:
        """All of it arrives in order; then nothing is open."""
        near, far, link = await self.connect()
        for sender, receiver in ((near, far), (far, near)):
            receiver.wanted = len(MUCH)
            assert sender.transport is not None
            sender.transport.write(MUCH)
        assert near.transport is not None
        await near.complete
        await far.complete
        self.assertTrue(bytes(near.got) == bytes(far.got) == MUCH)
        self.assertGreater(len(link.pipes), 0)
        near.transport.loseConnection()
        await near.lost
        await far.lost
        await self.end(link)

    async def test_an_end_that_goes_in_the_middle(self) -> None:
        """What was on its way is dropped, and its pipes are closed."""
        near, far, link = await self.connect()
        assert near.transport is not None
        far_transport: Any = far.transport
        far_transport.pauseProducing()
        near.transport.write(MUCH)
        await self.until(lambda: len(link.pipes) > 0)
        far_transport.abortConnection()
        await near.lost
        await self.end(link)

    async def end(self, link: SharedLink) -> None:
        """Wait until the relay has lost its connections; nothing of them is left then."""
        await self.until(lambda: link.pipes._users == 0)
        loop: Any = reactor
        await deferLater(loop, 2 * link.shape.rtt_s)
        self.assertEqual(len(link.pipes), 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when a condition holds; the test's timeout is the bound."""
        loop: Any = reactor
        while not condition():
            await deferLater(loop, 0.001)

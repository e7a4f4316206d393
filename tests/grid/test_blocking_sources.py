"""Sources that may never come to their end: pipes, objects that block, iterators, producers, responses."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, FileBodyProducer
from twisted.web.iweb import UNKNOWN_LENGTH, IBodyProducer
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site
from zope.interface import implementer

from pipegrid import Grid, PipelinedAgent, SourceError, UsageError, create_local
from pipegrid.transfer.put import copied_source

LARGE = bytes(range(256)) * 2000
"""More than a pipe holds, and than is copied in memory."""


def descriptors() -> set[str]:
    """Return what is open in this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found


class SilentObject:
    """A file object of no system's, whose ``read`` returns when the test says so."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def read(self, length: int = -1) -> bytes:
        self.asked.set()
        self.answer.wait(30)
        return b""


class GridCase(TestCase):
    """A grid of this process."""

    async def setUp(self) -> None:  # type: ignore[override]
        directory = self.mktemp()
        create_local(directory, durability="none")
        self.grid = await Grid.open(reactor, directory)
        self.addCleanup(self.grid.close)

    def pipe(self) -> tuple[Any, int]:
        """Return a pipe: what reads it, as a file object, and the descriptor that writes."""
        reading, writing = os.pipe()
        file = os.fdopen(reading, "rb")
        self.addCleanup(file.close)
        return file, writing

    async def stored(self, source: Any) -> bytes:
        """Store it, and return what is stored."""
        data: bytes = await self.grid.read((await self.grid.put(source)).cap)
        return data


class PipeTests(GridCase):
    """What another program may never write to."""

    async def test_silent_pipes_keep_nobody_waiting(self) -> None:
        """Others are stored meanwhile; cancellation ends a put; the pipe is as good as before."""
        pipes = [self.pipe() for _ in range(4)]
        puts = [self.grid.put(file) for file, _ in pipes]
        self.assertEqual(await self.stored(LARGE), LARGE)
        for put in puts:
            put.cancel()
            with self.assertRaises(CancelledError):
                await put
        for _, writing in pipes:
            os.write(writing, b"late")
            os.close(writing)
        self.assertEqual(pipes[0][0].read(), b"late")

    async def test_close_ends_them(self) -> None:
        """The grid's end waits for none of them."""
        file, writing = self.pipe()
        self.addCleanup(os.close, writing)
        silent = SilentObject()
        self.addCleanup(silent.answer.set)
        puts = [self.grid.put(file), self.grid.put(silent)]  # type: ignore[arg-type]
        await deferLater(reactor, 0.05)
        await self.grid.close()
        for put in puts:
            with self.assertRaises(CancelledError):
                await put

    async def test_nothing_is_left(self) -> None:
        """Neither a temporary file nor another descriptor, of what was copied in part."""
        file, writing = self.pipe()
        self.addCleanup(os.close, writing)
        await self.grid.put(b"warm" * 100)
        await deferLater(reactor, 0)  # the reactor has all of its own then
        before = descriptors()
        spools: list[Any] = []

        def opened(**options: Any) -> Any:
            spools.append(make(**options))
            return spools[-1]

        make = tempfile.TemporaryFile
        self.patch(tempfile, "TemporaryFile", opened)
        put = self.grid.put(file)
        for _ in range(3):
            os.write(writing, bytes(50_000))
            await deferLater(reactor, 0.05)
        self.assertEqual([spool.closed for spool in spools], [False])
        put.cancel()
        with self.assertRaises(CancelledError):
            await put
        self.assertEqual([spool.closed for spool in spools], [True])
        for _ in range(100):
            if descriptors() <= before:
                break
            await deferLater(reactor, 0.02)
        self.assertLessEqual(descriptors(), before)

    async def test_an_object_that_cannot_be_woken(self) -> None:
        """Its thread ends when its read returns; the put, and what it held, ended before."""
        silent = SilentObject()
        put = self.grid.put(silent)  # type: ignore[arg-type]
        while not silent.asked.is_set():
            await deferLater(reactor, 0.01)
        put.cancel()
        with self.assertRaises(CancelledError):
            await put
        silent.answer.set()

    async def test_what_comes_in_pieces(self) -> None:
        """All of it is stored, from a pipe, a named one, and one whose beginning the caller has read."""
        named = self.mktemp()
        os.mkfifo(named)

        def feed(target: Any) -> None:
            with open(target, "wb", buffering=0) as end:
                for start in range(0, len(LARGE), 50_000):
                    end.write(LARGE[start : start + 50_000])

        for path in (None, named):
            file, writing = (None, -1) if path is not None else self.pipe()
            feeder = threading.Thread(target=feed, args=(path or writing,))
            feeder.start()
            if file is None:
                self.assertEqual(await self.stored(path), LARGE)
            else:
                head = file.read(10)  # the buffer has more than that
                self.assertEqual(head + await self.stored(file), LARGE)
            feeder.join()

    async def test_a_named_pipe_without_a_writer(self) -> None:
        """It is not waited for in a worker either, and a mutable file's source no more than others."""
        named = self.mktemp()
        os.mkfifo(named)
        puts: list[Deferred[Any]] = [
            *(self.grid.put(named) for _ in range(70)),
            self.grid.create_mutable(named),
        ]
        self.assertEqual(await self.stored(b"short" * 100), b"short" * 100)
        path = self.mktemp()
        Path(path).write_bytes(LARGE)
        self.assertEqual(await self.stored(path), LARGE)
        for put in puts:
            put.cancel()
            with self.assertRaises(CancelledError):
                await put

    async def test_too_much_for_a_mutable_file(self) -> None:
        """A pipe without an end is not copied until the disk is full."""
        with open("/dev/zero", "rb") as zeros, self.assertRaises(UsageError) as caught:
            await self.grid.create_mutable(zeros)
        self.assertIn("store it as an immutable one", str(caught.exception))

    def test_sigterm(self) -> None:
        """A program whose puts wait for silent pipes ends when it is told to."""
        program = (
            "import os, sys\n"
            "from twisted.internet import task\n"
            "from pipegrid import Grid, create_local\n"
            "async def main(reactor):\n"
            "    create_local(sys.argv[1], durability='none')\n"
            "    grid = await Grid.open(reactor, sys.argv[1])\n"
            "    await grid.put(b'warm' * 1000000)\n"
            "    puts = [grid.put(os.fdopen(os.pipe()[0], 'rb')) for _ in range(3)]\n"
            "    print('ready', flush=True)\n"
            "    await puts[0]\n"
            "task.react(main)\n"
        )
        running = subprocess.Popen(
            [sys.executable, "-c", program, self.mktemp()], stdout=subprocess.PIPE
        )
        with running:
            assert running.stdout is not None
            self.assertEqual(running.stdout.readline(), b"ready\n")
            running.send_signal(signal.SIGTERM)
            self.assertIsNotNone(running.wait(20))


async def pieces(total: int = 20, size: int = 25_600) -> AsyncIterator[bytes]:
    """Yield ``LARGE``, with turns of the reactor between the pieces."""
    for number in range(total):
        await deferLater(reactor, 0)
        yield LARGE[number * size : (number + 1) * size]


@implementer(IBodyProducer)
class Producer:
    """Gives ``LARGE`` when it may, and then what the test wants."""

    def __init__(self, length: Any = UNKNOWN_LENGTH, ends: bool = True) -> None:
        self.length = length
        self.ends = ends
        self.pauses = 0
        self.stopped = self.paused = False
        self.at = 0

    def startProducing(self, consumer: Any) -> Deferred[None]:
        self.consumer = consumer
        self.done: Deferred[None] = Deferred()
        self._give()
        return self.done

    def _give(self) -> None:
        while self.at < 8 * len(LARGE) and not self.paused:
            self.at += 1 << 16
            self.consumer.write(LARGE[: 1 << 16])
        if self.at >= 8 * len(LARGE) and self.ends and not self.done.called:
            self.done.callback(None)

    def pauseProducing(self) -> None:
        self.paused = True
        self.pauses += 1

    def resumeProducing(self) -> None:
        self.paused = False
        self._give()

    def stopProducing(self) -> None:
        self.stopped = True


class StreamedTests(GridCase):
    """What comes through the reactor."""

    async def test_an_async_iterator(self) -> None:
        """Short and long; nothing of the file system is needed for a short one."""
        self.assertEqual(await self.stored(pieces()), LARGE)
        with no_spools(self):
            self.assertEqual(await self.stored(pieces(2)), LARGE[:51_200])
        cap = (await self.grid.create_mutable(pieces(2))).cap
        self.assertEqual(await self.grid.read(cap), LARGE[:51_200])
        [one] = await self.grid.put_many([pieces(3)])
        assert not isinstance(one, Failure)
        self.assertEqual(one.size, 3 * 25_600)

    async def test_an_iterator_that_fails(self) -> None:
        """Its error is the cause; what it gave before is not stored; what is no bytes is told."""

        async def failing() -> AsyncIterator[bytes]:
            yield LARGE
            raise ValueError("the tape is torn.")

        with self.assertRaises(SourceError) as caught:
            await self.grid.put(failing())
        self.assertEqual(
            str(caught.exception),
            "cannot read the async iterator: the tape is torn; nothing was stored",
        )
        self.assertIsInstance(caught.exception.__cause__, ValueError)

        async def texts() -> AsyncIterator[Any]:
            yield "text"

        with self.assertRaises(SourceError) as caught:
            await self.grid.put(texts())
        self.assertIn("in place of bytes", str(caught.exception))

    async def test_an_iterator_is_ended(self) -> None:
        """By cancellation, and its ``finally`` runs."""
        ended: list[bool] = []

        async def endless() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"more"
                    await Deferred()
            finally:
                ended.append(True)

        put = self.grid.put(endless())
        put.cancel()
        with self.assertRaises(CancelledError):
            await put
        self.assertEqual(ended, [True])

    async def test_a_producer(self) -> None:
        """Twisted's own; and one that is paused when it gives faster than can be written."""
        self.assertEqual(await self.stored(FileBodyProducer(io.BytesIO(LARGE))), LARGE)
        producer = Producer()
        result = await self.grid.put(producer)
        self.assertEqual(result.size, producer.at)
        self.assertGreaterEqual(producer.pauses, 2)
        self.assertFalse(producer.stopped)

    async def test_a_producer_that_gives_too_little(self) -> None:
        """It is not taken for the whole."""
        with self.assertRaises(SourceError) as caught:
            await self.grid.put(Producer(length=10**9))
        self.assertIn("in place of the 1000000000 that it named", str(caught.exception))

    async def test_a_producer_is_stopped(self) -> None:
        """When it is not wanted any more."""
        producer = Producer(ends=False)
        put = self.grid.put(producer)
        await deferLater(reactor, 0.05)
        put.cancel()
        with self.assertRaises(CancelledError):
            await put
        self.assertTrue(producer.stopped)


class Body(Resource):
    """A web page that is ``LARGE``, or ends before it is."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        if request.path == b"/short":
            request.setHeader(b"content-length", b"%d" % (2 * len(LARGE)))
            request.write(LARGE)
            reactor.callLater(0.1, request.transport.abortConnection)
            return NOT_DONE_YET  # type: ignore[return-value]
        return LARGE


class ResponseTests(GridCase):
    """Answers of web servers, as agents and treq have them."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Site(Body()))
        self.addCleanup(port.stopListening)
        self.url = f"http://127.0.0.1:{port.getHost().port}"
        self.agent = PipelinedAgent(reactor)
        self.addCleanup(self.agent.close)

    async def test_responses(self) -> None:
        """Of ``PipelinedAgent``, Twisted's agent, and treq."""
        import treq.client

        url = self.url.encode()
        for agent in (self.agent, Agent(reactor)):
            self.assertEqual(await self.stored(await agent.request(b"GET", url)), LARGE)
        client = treq.client.HTTPClient(self.agent)
        self.assertEqual(await self.stored(await client.get(self.url)), LARGE)
        self.assertEqual(await self.stored(await client.get(self.url, unbuffered=True)), LARGE)

    async def test_one_that_is_cut_off(self) -> None:
        """Is an error, not a shorter file."""
        response = await self.agent.request(b"GET", self.url.encode() + b"/short")
        with self.assertRaises(SourceError) as caught:
            await self.grid.put(response)
        self.assertIn("cannot read the response", str(caught.exception))


@contextlib.contextmanager
def no_spools(case: TestCase) -> Iterator[None]:
    """Nothing is copied to a temporary file meanwhile."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} needs no temporary file")

    patch = case.patch(copied_source, "open_spool", refuse)
    yield
    patch.restore()

"""Files on their way to what may not be read: pipes, named ones, sockets, slow objects."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

from pipegrid import SinkError
from tests.grid.test_blocking_sources import LARGE, GridCase, descriptors

CONTENT = LARGE * 8
"""Several segments, and far more than pipes and sockets hold."""


class SlowObject:
    """A file object of no system's, whose ``write`` returns when the test says so."""

    def __init__(self) -> None:
        self.taken = b""
        self.flushes = self.at_once = self.most_at_once = 0
        self.asked, self.answer = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.set()
        self.answer.wait(30)
        self.taken += bytes(data)
        self.at_once -= 1
        return len(data)

    def flush(self) -> None:
        self.flushes += 1


class SinkCase(GridCase):
    """A grid of this process with a file on it."""

    async def setUp(self) -> None:  # type: ignore[override]
        await super().setUp()
        self.cap = (await self.grid.put(CONTENT)).cap
        self.mutable = (await self.grid.create_mutable(LARGE)).cap

    def silent_pipe(self) -> tuple[int, Any]:
        """Return the end that nobody reads, as a descriptor, and the end to write to, as a file object."""
        reading, writing = os.pipe()
        file = os.fdopen(writing, "wb")
        self.addCleanup(file.close)
        return reading, file

    def named_pipe(self) -> str:
        path: str = self.mktemp()
        os.mkfifo(path)
        return path

    async def assert_others_go_on(self) -> None:
        """A put and a get of the same grid are done meanwhile."""
        self.assertEqual(await self.stored(LARGE), LARGE)
        self.assertEqual(await self.grid.read(self.cap), CONTENT)

    async def assert_cancelled(self, *gets: Deferred[Any]) -> None:
        for get in gets:
            with self.assertRaises(CancelledError):
                await get


class Reader(threading.Thread):
    """Reads a pipe or socket to its end."""

    def __init__(self, target: Any) -> None:
        super().__init__(daemon=True)
        self._target = target
        self.taken = b""
        self.start()

    def run(self) -> None:
        with open(self._target, "rb") as file:
            self.taken = file.read()


class ReadTests(SinkCase):
    """What is read to its end gets all of it, in order."""

    async def test_pipes_and_sockets(self) -> None:
        """Behind what the caller has written; the file objects stay open and wait as before."""
        for buffering in (-1, 0):
            reading, writing = os.pipe()
            reader = Reader(reading)
            with os.fdopen(writing, "wb", buffering) as file:
                file.write(b"head")
                await self.grid.get(self.cap, file)
                self.assertTrue(os.get_blocking(writing))
                await self.grid.get(self.mutable, file)
                await self.grid.get(self.cap, file, start=7, length=0)
                file.write(b"foot")
            reader.join()
            self.assertEqual(reader.taken, b"head" + CONTENT + LARGE + b"foot")
        ours, theirs = socket.socketpair()
        reader = Reader(theirs.detach())
        with ours, ours.makefile("wb") as file:
            file.write(b"head")
            await self.grid.get(self.cap, file)
        reader.join()
        self.assertEqual(reader.taken, b"head" + CONTENT)

    async def test_named_pipes(self) -> None:
        """Whoever opens it first, and also for what the cap itself holds."""
        path = self.named_pipe()
        short = (await self.grid.put(b"short")).cap
        for cap, expected in ((self.cap, CONTENT), (short, b"short"), (self.mutable, LARGE)):
            reader = Reader(path)
            await self.grid.get(cap, path)
            reader.join()
            self.assertEqual(reader.taken, expected)
        get = self.grid.get(self.cap, path)
        await deferLater(reactor, 0.1)
        reader = Reader(path)
        self.assertEqual((await get).size, len(CONTENT))
        reader.join()
        self.assertEqual(reader.taken, CONTENT)

    async def test_a_slow_object(self) -> None:
        """One write at a time; the get pauses; it is flushed once, at the end."""
        slow = SlowObject()
        get = self.grid.get(self.cap, slow)  # type: ignore[arg-type]
        await self.assert_others_go_on()
        self.assertTrue(slow.asked.is_set())
        self.assertEqual(slow.taken, b"")
        slow.answer.set()
        await get
        self.assertEqual(slow.taken, CONTENT)
        self.assertEqual((slow.most_at_once, slow.flushes), (1, 1))

    async def test_devices(self) -> None:
        """By path and as a file object."""
        await self.grid.get(self.cap, os.devnull)
        with open(os.devnull, "wb") as file:
            await self.grid.get(self.cap, file)


class UnreadTests(SinkCase):
    """What nobody reads keeps nobody waiting."""

    async def test_silent_readers(self) -> None:
        """Several at once; others go on; cancellation ends them, and leaves no descriptor or thread."""
        await self.grid.read(self.cap)
        await deferLater(reactor, 0)  # the reactor has all of its own then
        pipes = [self.silent_pipe() for _ in range(4)]
        sockets = socket.socketpair()
        file = sockets[0].makefile("wb")
        before = descriptors()
        gets = [self.grid.get(self.cap, file) for _, file in pipes]
        gets += [self.grid.get(self.mutable, pipes[0][1]), self.grid.get(self.cap, file)]
        await self.assert_others_go_on()
        for get in gets:
            get.cancel()
        await self.assert_cancelled(*gets)
        for _ in range(100):
            names = [thread.name for thread in threading.enumerate()]
            if descriptors() <= before and "pipegrid-blocking" not in names:
                break
            await deferLater(reactor, 0.02)
        self.assertLessEqual(descriptors(), before)
        self.assertNotIn("pipegrid-blocking", names)
        for reading, _ in pipes:
            os.close(reading)
        file.close()
        for one in sockets:
            one.close()

    async def test_nothing_is_written_after_a_cancellation(self) -> None:
        """What the pipe held then is a beginning of the file; nothing comes behind it."""
        reading, file = self.silent_pipe()
        get = self.grid.get(self.cap, file)
        await deferLater(reactor, 0.1)
        get.cancel()
        await self.assert_cancelled(get)
        await deferLater(reactor, 0.05)
        reader = Reader(reading)
        file.close()
        reader.join()
        self.assertGreater(len(reader.taken), 1000)
        self.assertEqual(reader.taken, CONTENT[: len(reader.taken)])

    async def test_named_pipes_without_readers(self) -> None:
        """They are not waited for in the reactor or a worker."""
        paths = [self.named_pipe() for _ in range(8)]
        gets = [self.grid.get(self.cap, path) for path in paths]
        await self.assert_others_go_on()
        for get in gets:
            get.cancel()
        await self.assert_cancelled(*gets)

    async def test_a_full_buffer_of_the_caller(self) -> None:
        """What the caller wrote before does not keep the thread either."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        os.set_blocking(writing, True)
        file = os.fdopen(writing, "wb")
        file.write(b"head")
        get = self.grid.get(self.cap, file)
        await self.assert_others_go_on()
        get.cancel()
        await self.assert_cancelled(get)
        Reader(reading)
        file.close()

    async def test_close_ends_them(self) -> None:
        """The grid's end waits for none of them."""
        reading, file = self.silent_pipe()
        self.addCleanup(os.close, reading)
        slow = SlowObject()
        self.addCleanup(slow.answer.set)
        gets = [
            self.grid.get(self.cap, file),
            self.grid.get(self.cap, slow),  # type: ignore[arg-type]
            self.grid.get(self.cap, self.named_pipe()),
        ]
        await deferLater(reactor, 0.05)
        await self.grid.close()
        await self.assert_cancelled(*gets)

    def test_sigterm(self) -> None:
        """A program whose gets wait for readers ends when it is told to."""
        program = (
            "import os, socket, sys\n"
            "from twisted.internet import reactor, task\n"
            "from pipegrid import Grid, create_local\n"
            "async def main(reactor):\n"
            "    create_local(sys.argv[1], durability='none')\n"
            "    grid = await Grid.open(reactor, sys.argv[1])\n"
            "    cap = (await grid.put(b'warm' * 1000000)).cap\n"
            "    reading, writing = os.pipe()\n"
            "    pair = socket.socketpair()\n"
            "    os.mkfifo(sys.argv[2])\n"
            "    sinks = [os.fdopen(writing, 'wb'), pair[0].makefile('wb'), sys.argv[2]]\n"
            "    gets = [grid.get(cap, sink) for sink in sinks]\n"
            "    await task.deferLater(reactor, 0.2)\n"
            "    print('ready', flush=True)\n"
            "    for get in gets[1:]:\n"
            "        get.addErrback(lambda _: None)\n"
            "    await gets[0]\n"
            "task.react(main)\n"
        )
        running = subprocess.Popen(
            [sys.executable, "-c", program, self.mktemp(), self.mktemp()], stdout=subprocess.PIPE
        )
        with running:
            assert running.stdout is not None
            self.assertEqual(running.stdout.readline(), b"ready\n")
            running.send_signal(signal.SIGTERM)
            self.assertIsNotNone(running.wait(20))


class FailingTests(SinkCase):
    """Each failure is one sentence."""

    async def assert_refused(self, sink: Any, text: str) -> BaseException | None:
        with self.assertRaises(SinkError) as caught:
            await self.grid.get(self.cap, sink)
        self.assertIn(text, str(caught.exception))
        cause: BaseException | None = caught.exception.__cause__
        return cause

    async def test_a_reader_that_leaves(self) -> None:
        """Before, or in the middle."""
        gone = "its reader has gone; start the reader again"
        reading, file = self.silent_pipe()
        os.close(reading)
        self.assertIsInstance(await self.assert_refused(file, gone), BrokenPipeError)
        reading, file = self.silent_pipe()
        get = self.grid.get(self.cap, file)
        await deferLater(reactor, 0.05)
        os.read(reading, 5000)
        os.close(reading)
        with self.assertRaises(SinkError) as caught:
            await get
        self.assertIn(gone, str(caught.exception))
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours, ours.makefile("wb") as socket_file:
            await self.assert_refused(socket_file, gone)
        path = self.named_pipe()
        get = self.grid.get(self.cap, path)
        await deferLater(reactor, 0.05)
        os.close(os.open(path, os.O_RDONLY))
        with self.assertRaises(SinkError) as caught:
            await get
        self.assertEqual(str(caught.exception), f"cannot write {path}: {gone}")

    async def test_what_cannot_be_written(self) -> None:
        """A full device, a socket's path, what is closed, not for writing, or for text."""
        await self.assert_refused("/dev/full", "cannot write /dev/full: No space left on device")
        path = self.mktemp()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            await self.assert_refused(path, f"cannot write {path}: ")
        reading, file = self.silent_pipe()
        with os.fdopen(reading, "rb") as wrong:
            await self.assert_refused(wrong, "give a file that is open for writing")
        file.close()
        await self.assert_refused(file, "closed file")
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        with os.fdopen(writing, "w") as text:
            await self.assert_refused(text, "give a file that is open in binary mode")

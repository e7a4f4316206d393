"""Writing to another program, which may not read for ever."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import interruptible_pipe_writes
from pipegrid.disk.interruptible_pipe_writes import end_waiting, interruptible
from pipegrid.disk.part_file import PartFile
from pipegrid.disk.private_files import open_private
from pipegrid.disk.safe_open import read_file

SOON_S = 0.05


class EnoughError(Exception):
    """The signal has come."""


class PatienceTests(SynchronousTestCase):
    """A pipe without a reader, and a signal."""

    def setUp(self) -> None:
        self.patch(interruptible_pipe_writes, "_ended", None)
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.pipe = self.directory / "pipe"
        os.mkfifo(self.pipe)

    def alarm_soon(self) -> None:
        """Have a signal come that is to end everything."""

        def told(number: int, frame: Any) -> None:
            end_waiting(EnoughError())

        before = signal.signal(signal.SIGALRM, told)
        self.addCleanup(signal.signal, signal.SIGALRM, before)
        self.addCleanup(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, SOON_S, SOON_S)

    def test_a_pipe_that_nobody_opens(self) -> None:
        """Opening it to write ends with the signal; without one it would wait for ever."""
        self.alarm_soon()
        with self.assertRaises(EnoughError):
            PartFile(str(self.pipe))
        with self.assertRaises(EnoughError):
            open_private(str(self.pipe), os.O_WRONLY)

    def test_a_pipe_that_nobody_reads(self) -> None:
        """So does writing, as soon as it is full."""
        end = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, end)
        part = PartFile(str(self.pipe))
        self.addCleanup(part.close)
        self.alarm_soon()
        with self.assertRaises(EnoughError):
            part.write(bytes(1 << 20))
        self.assertGreater(len(os.read(end, 1 << 20)), 4000)

    def test_after_the_signal(self) -> None:
        """What would wait does not begin to; what need not is done."""
        end = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, end)
        part = PartFile(str(self.pipe))
        self.addCleanup(part.close)
        end_waiting(EnoughError())
        part.write(b"hello")
        self.assertEqual(os.read(end, 100), b"hello")
        os.set_blocking(part.fileno(), False)
        os.write(part.fileno(), bytes(1 << 20))  # as much as it takes
        os.set_blocking(part.fileno(), True)
        with self.assertRaises(EnoughError):
            part.write(b"more")

    def test_a_pipe_that_somebody_reads(self) -> None:
        """Who is just writing to it has what it ends with, and not the signal in the middle of that."""
        end = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, end)
        part = PartFile(str(self.pipe))
        self.addCleanup(part.close)
        with interruptible(part.fileno):
            end_waiting(EnoughError())
        os.set_blocking(part.fileno(), False)
        os.write(part.fileno(), bytes(1 << 20))
        with self.assertRaises(EnoughError), interruptible(part.fileno):
            self.fail("it would wait")

    def test_files_of_ones_own(self) -> None:
        """They are opened after the signal as before: what ends has things to write down."""
        end_waiting(EnoughError())
        os.close(open_private(str(self.directory / "note"), os.O_WRONLY))

    def test_other_threads(self) -> None:
        """Handlers do not run in them, so that they are left alone."""
        begun, end = threading.Event(), threading.Event()

        def work() -> None:
            with interruptible():
                begun.set()
                end.wait()

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        end_waiting(EnoughError())
        end.set()
        thread.join()


class ReadingTests(SynchronousTestCase):
    """Files of settings and notes."""

    def test_a_pipe_in_the_place_of_a_file(self) -> None:
        """It is not waited for; files, devices and what is not there are as ever."""
        directory = Path(self.mktemp())
        directory.mkdir()
        pipe = directory / "pipe"
        os.mkfifo(pipe)
        error = self.assertRaises(OSError, read_file, pipe)
        self.assertIn("named pipe", str(error))
        file = directory / "file"
        file.write_bytes(b"hello")
        self.assertEqual((read_file(file), read_file(file, 2)), (b"hello", b"he"))
        self.assertEqual(read_file(Path("/dev/null")), b"")
        self.assertRaises(FileNotFoundError, read_file, directory / "none")
        error = self.assertRaises(IsADirectoryError, read_file, directory)
        self.assertEqual(error.filename, str(directory))

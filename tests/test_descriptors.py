"""What a test has left open is found, and nothing else."""

from __future__ import annotations

import os
from threading import Timer
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests import descriptors
from tests.descriptors import left_open, open_files


class LeftOpenTests(SynchronousTestCase):
    """Descriptors that are opened between two looks."""

    def setUp(self) -> None:
        self.patch(descriptors, "_PATIENCE_S", 0.05)
        self.path = os.path.abspath(self.mktemp())

    def test_one_that_stays(self) -> None:
        """It is named, even if another one was closed meanwhile and has given it its number."""
        old = os.open(os.devnull, os.O_RDONLY)
        before = open_files()
        os.close(old)
        new = os.open(self.path, os.O_CREAT | os.O_WRONLY)
        self.assertEqual(left_open(before), [self.path])
        os.close(new)
        self.assertEqual(left_open(before), [])

    def test_garbage(self) -> None:
        """What only waits to be collected is not left open."""
        before = open_files()
        cycle: list[Any] = [os.fdopen(os.open(os.devnull, os.O_RDONLY))]
        cycle.append(cycle)
        self.addCleanup(self.flushWarnings)
        del cycle
        self.assertEqual(left_open(before), [])

    def test_a_thread(self) -> None:
        """One that lets go a moment later is waited for."""
        self.patch(descriptors, "_PATIENCE_S", 60.0)
        before = open_files()
        thread = Timer(0.02, os.close, [os.open(os.devnull, os.O_RDONLY)])
        thread.start()
        self.assertEqual(left_open(before), [])
        thread.join()

"""A command that is stopped, and goes on, has not waited for anybody meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from misc.command import environment
from twisted.internet.selectreactor import SelectReactor
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.process_settings import (
    CLOCK,
    StandingClock,
    ignore_suspended_time,
    is_standing,
    make_monotonic,
)
from pipegrid.wire.banana_receiver import BoundedReceiver

STOPPED_S = 1.5

COMMAND = """
import sys, time
from pipegrid.cli.startup import process
from pipegrid.cli.console import Console
from pipegrid.cli.command_job import Invocation
from twisted.internet.task import deferLater

async def wait(reactor):
    began_s, reactor_s, calls = time.monotonic(), reactor.seconds(), 0
    print("ready", flush=True)
    silent = reactor.callLater(1.0, print, "silent", flush=True)
    while calls < 15:
        calls += 1
        await deferLater(reactor, 0.03)
    silent.cancel()
    print(reactor.seconds() - reactor_s, time.monotonic() - began_s, flush=True)
    return 0

def start(reactor):
    from twisted.internet.defer import Deferred
    return Deferred.fromCoroutine(wait(reactor))

sys.exit(process._run_reactor(start, Invocation(Console(None, None, sys.stderr))))
"""


class StandingClockTests(SynchronousTestCase):
    """The clock alone."""

    def test_it_goes_on_from_where_it_was(self) -> None:
        """Each time; and what is told twice, or without a stop, changes next to nothing."""
        now = [100.0]
        clock = StandingClock(lambda: now[0])
        now[0] = 101.0
        self.assertEqual(clock.seconds(), 101.0)
        now[0] = 300.0
        clock.went_on()
        self.assertEqual(clock.seconds(), 101.0)
        clock.went_on(signal.SIGCONT, None)
        now[0] = 310.0
        self.assertEqual(clock.seconds(), 111.0)
        clock.went_on()
        now[0] = 311.0
        self.assertEqual(clock.seconds(), 112.0)

    def test_it_never_goes_back(self) -> None:
        """Not even if it was read just before it was told."""
        now = [100.0]
        clock = StandingClock(lambda: now[0])
        now[0] = 200.0
        self.assertEqual(clock.seconds(), 200.0)
        clock.went_on()
        self.assertEqual(clock.seconds(), 200.0)


class PassOverStopsTests(SynchronousTestCase):
    """A reactor with that clock."""

    def test_it_stays(self) -> None:
        """Who wants the monotonic clock has got it: ``serve`` asks for it once more."""
        before = signal.getsignal(signal.SIGCONT)
        self.addCleanup(signal.signal, signal.SIGCONT, before)
        reactor: Any = SelectReactor()
        self.addCleanup(reactor.removeAll)
        make_monotonic(reactor)
        self.assertFalse(is_standing(reactor))
        call = reactor.callLater(5.0, int)
        ignore_suspended_time(reactor)
        make_monotonic(reactor)
        self.assertTrue(is_standing(reactor))
        self.assertEqual(call.seconds, reactor.seconds)

    def test_foolscap(self) -> None:
        """Its connections measure silence with the same clock."""
        self.patch(CLOCK, "_stood_s", 1000.0)
        self.assertLess(BoundedReceiver.seconds(), time.monotonic() - 999.0)


class CommandTests(SynchronousTestCase):
    """A process with the reactor of all commands."""

    def test_stopped(self) -> None:
        """What was to be given up after a second is not, when the process was stopped for longer."""
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND], env=environment(), stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        self.assertEqual(process.stdout.readline(), "ready\n")
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(process.pid, signal.SIGCONT)
        line = process.stdout.readline()
        self.assertNotEqual(line, "silent\n")
        counted_s, passed_s = map(float, line.split())
        self.assertGreater(passed_s, STOPPED_S)
        self.assertLess(counted_s, passed_s - 0.9 * STOPPED_S)
        self.assertEqual(process.wait(30), 0)

"""
Processes that a speed test starts: each says first, in one line of JSON, where it is, and ends with us.

They end when their standard input does, so that none outlives the process that started it, however that
ended. ``Popen`` and the reactor's threads do the work here: Twisted's own processes need a signal handler
that the command line does not install.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

import pipegrid
from pipegrid.errors import PipegridError
from pipegrid.reactor.collector import calm_collector
from pipegrid.reactor.together import as_deferred

_JOB = "PIPEGRID_SPEEDTEST_JOB"

START_S = 120.0
"""A busy machine takes long to start ten of them."""
STOP_S = 10.0


class ChildError(PipegridError):
    """A process that the speed test needs did not start; what it printed says why."""


class ChildProcess:
    """
    A running process.

    Attributes:
        said: its first line.
    """

    def __init__(self, reactor: Any, process: subprocess.Popen[str]) -> None:
        self._reactor = reactor
        self._process = process
        self.said: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @as_deferred
    async def stop(self) -> None:
        """End it; fires when it has ended."""
        # From here on it ends, whatever becomes of us.
        self._process.terminate()
        await in_thread(self._reactor, reap, self._process, STOP_S)


@as_deferred
async def start_child(
    reactor: Any, module: str, job: Any, timeout_s: float = START_S
) -> ChildProcess:
    """
    Start ``python -m module``; fires when it has said its line. Cancelling ends it.

    Args:
        job: what it is to do, as JSON can hold it; nobody else on the machine can read it.

    Fails with ChildError: it ended, or said something else, or nothing for so long.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**_environment(), _JOB: json.dumps(job)},
    )
    child = ChildProcess(reactor, process)
    assert process.stdout is not None
    # Killing it ends the read, so no thread is left behind.
    limit = reactor.callLater(timeout_s, process.kill)
    try:
        line = await in_thread(reactor, process.stdout.readline)
        child.said = json.loads(line)
    except ValueError:
        await child.stop()
        raise ChildError(
            f"the process {module} did not start (status {process.returncode}); see what it printed"
        ) from None
    except BaseException:
        process.kill()
        await child.stop()
        raise
    finally:
        if limit.active():
            limit.cancel()
    return child


def in_thread(reactor: Any, work: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
    """Do in a thread of the reactor's pool what waits."""
    return deferToThreadPool(reactor, reactor.getThreadPool(), work, *arguments)


def reap(process: subprocess.Popen[str], within_s: float) -> None:
    """Wait until a process has ended that was told to, and end it if it has not after so long."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()  # some end with it, and have a thread that waits for it
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _environment() -> dict[str, str]:
    """Let the process find the same package."""
    found = os.environ.get("PYTHONPATH")
    here = str(Path(pipegrid.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, found] if found else [here])}


# In the child.


def be_child(start: Callable[[Any, Any], Any]) -> None:
    """
    Run a reactor until standard input ends.

    Args:
        start: given the reactor and the job, begins the work and returns what to say, as JSON can hold it.
    """
    from twisted.internet import reactor as installed_reactor

    reactor: Any = installed_reactor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for our parent, which then ends us
    said = start(reactor, json.loads(os.environ[_JOB]))
    print(json.dumps(said), flush=True)
    calm_collector()
    reactor.callInThread(lambda: (sys.stdin.read(), reactor.callFromThread(reactor.stop)))
    reactor.run(installSignalHandlers=False)  # SIGTERM needs no ceremony here

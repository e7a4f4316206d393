"""Commands of the user that run after a backup: ``--on-success``, ``--on-failure``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from twisted.internet.defer import CancelledError
from twisted.internet.task import deferLater

SHELL = "/bin/sh"

TIME_LIMIT_S = 600.0
"""A hook that takes longer is ended, with all processes of its session's group."""

_ENDING_S = 5.0
"""How long it may take after SIGTERM, before SIGKILL."""

MAX_OUTPUT_BYTES = 64 << 10
"""Of what it prints, the first that is shown; the rest is read and dropped."""

_PIECE_BYTES = 64 << 10
_PIECES_A_TURN = 16
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2


class HookOutcome(NamedTuple):
    """
    The end of a hook.

    Attributes:
        problem: a clause that says how it failed; None: it succeeded.
        output: the first bytes that it printed, on either stream.
        dropped_bytes: that it printed after those.
    """

    problem: str | None
    output: bytes = b""
    dropped_bytes: int = 0


class _Output:
    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self.kept = bytearray()
        self.dropped_bytes = 0

    def read(self) -> bool:
        """Read what is there, within bounds; returns whether something was."""
        found = False
        for _ in range(_PIECES_A_TURN):
            try:
                piece = os.read(self._fd, _PIECE_BYTES)
            except BlockingIOError:
                break
            if not piece:
                break
            found = True
            space = MAX_OUTPUT_BYTES - len(self.kept)
            self.kept += piece[:space]
            self.dropped_bytes += max(0, len(piece) - space)
        return found


async def run_hook(
    reactor: Any,
    command: str,
    variables: Mapping[str, str],
    time_limit_s: float = TIME_LIMIT_S,
) -> HookOutcome:
    """
    Run a command by the shell; it has no input, and the variables in addition to the environment.

    Cancelling ends it. Its end is polled, since a reactor without signal handlers does not notice it.
    """
    try:
        process = subprocess.Popen(
            [SHELL, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return HookOutcome(f"it cannot be started: {error}")
    assert process.stdout is not None
    with process.stdout:
        output = _Output(process.stdout.fileno())
        ended = False
        try:
            ended = await _wait(reactor, process, output, time_limit_s)
            if not ended:
                _send(process, signal.SIGTERM)
                await _wait(reactor, process, output, _ENDING_S)
        finally:
            if not ended:  # also what the shell has left running
                _send(process, signal.SIGKILL)
            process.wait()
        output.read()
    problem = None if ended else f"it did not end within {time_limit_s:g} s, and was ended"
    if ended and process.returncode:
        problem = f"its exit status is {process.returncode}"
        if process.returncode < 0:
            problem = f"signal {-process.returncode} ended it"
    return HookOutcome(problem, bytes(output.kept), output.dropped_bytes)


async def _wait(
    reactor: Any, process: subprocess.Popen[bytes], output: _Output, time_limit_s: float
) -> bool:
    """Wait for the end of a process, and read its output meanwhile; returns whether it has ended."""
    until_s = reactor.seconds() + time_limit_s
    pause_s = _SHORTEST_PAUSE_S
    while not _has_ended(process):
        if reactor.seconds() >= until_s:
            return False
        pause_s = _SHORTEST_PAUSE_S if output.read() else min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            await deferLater(reactor, pause_s)
        except CancelledError:
            _send(process, signal.SIGTERM)
            raise
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended; until it is waited for, its number is that of its group alone."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the group of a process that has not been waited for."""
    with suppress(OSError):
        os.killpg(process.pid, number)

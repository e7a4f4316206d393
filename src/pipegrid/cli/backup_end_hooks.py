"""Hooks: commands of the user that run after a backup (``--on-success``, ``--on-failure``)."""

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
"""The maximum run time of a hook; after that, it and all processes of its process group are ended."""

_ENDING_S = 5.0
"""How long a hook may take to end after SIGTERM, before SIGKILL is sent."""

MAX_OUTPUT_BYTES = 64 << 10
"""How many bytes of a hook's output are shown, from its beginning; the rest is read and dropped."""

_PIECE_BYTES = 64 << 10
_PIECES_A_TURN = 16
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2


class HookOutcome(NamedTuple):
    """
    The outcome of a hook.

    Attributes:
        problem: a clause that says how the hook failed, or None.
        output: the beginning of what the hook printed, on either stream.
        dropped_bytes: how many bytes the hook printed after ``output``.
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
        """Read the output that has arrived, 1 MiB per call at most; return whether any had arrived."""
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
    Run a hook by the shell, without input, and with ``variables`` added to the environment.

    Cancelling ends the hook. The end of its process is polled, since a reactor without signal handlers does
    not notice it.
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
            if not ended:  # including processes that the shell has started
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
    """
    Wait until a process ends or its time limit is over, and read its output; return whether it has ended.
    """
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
    """
    Return whether a process has ended, without reaping it: thus no other process group can get its number.
    """
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group of a process that has not been reaped."""
    with suppress(OSError):
        os.killpg(process.pid, number)

"""One process, measured: how long it took, with its children; what it used; what it said."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from misc.speedtest.mirror.archive import Package, wrong
from misc.speedtest.mirror.tools import Call
from misc.speedtest.processes import peak_bytes

LOOK_S = 0.01
LIMIT_S = 900.0
TOLD_BYTES = 2000


class RunFailed(Exception):
    """A tool did not do what it was asked to; the text says what it said."""


@attrs.frozen
class Run:
    """
    Attributes:
        cpu_s: of the process and all that it started and waited for.
        peak_bytes: of the process alone, resident; 0 unless it was watched.
    """

    seconds: float
    cpu_s: float
    output: str
    peak_bytes: int = 0

    @property
    def report(self) -> dict[str, Any]:
        """What ``pipegrid --json`` said at the end."""
        result: dict[str, Any] = json.loads(self.output.strip().splitlines()[-1])
        return result


def run(
    call: Call,
    log: Path,
    *,
    watched: bool = False,
    meanwhile: Callable[[], None] | None = None,
    stdin: Path | None = None,
) -> Run:
    """
    Run a process to its end, start-up included.

    Args:
        log: where its errors go.
        watched: look at its memory every ten milliseconds.
        meanwhile: called in a thread when it has been started.

    Raises:
        RunFailed: its status is not 0, or it takes for ever.
    """
    with log.open("wb") as errors, open(stdin or os.devnull, "rb") as given:
        began = time.perf_counter()
        process = subprocess.Popen(
            call.command,
            env=call.environment,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        late = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        peak = _Peak(process.pid) if watched else None
        other = None if meanwhile is None else threading.Thread(target=meanwhile)
        if other is not None:
            other.start()
        assert process.stdout is not None
        output = process.stdout.read().decode("utf-8", "replace")
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        late.cancel()
        process.stdout.close()
        if other is not None:
            other.join()
    if process.returncode:
        told = (output + log.read_text("utf-8", "replace"))[-TOLD_BYTES:]
        raise RunFailed(f"{call.command[:6]} ended with {process.returncode}: {told}")
    used = usage.ru_utime + usage.ru_stime
    return Run(seconds, used, output, 0 if peak is None else peak.stop())


def verified(found: Run, packages: Sequence[Package], tree: Path) -> Run:
    """
    Return the run, if all of it is there and right.

    Raises:
        RunFailed: something is not.
    """
    bad = wrong(packages, tree)
    if bad:
        raise RunFailed(f"{len(bad)} of {len(packages)} files are missing or wrong, {bad[0]} first")
    return found


class _Peak:
    """Looks at a process's memory until it has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        with suppress(OSError, RuntimeError):  # it has ended
            while not self._over.wait(LOOK_S):
                self._bytes = max(self._bytes, peak_bytes(self._pid))

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self._bytes


def summed_up(runs: Sequence[Run]) -> dict[str, Any]:
    """Return median and spread, and what it cost."""
    seconds = [each.seconds for each in runs]
    summary: dict[str, Any] = {
        "median_s": round(statistics.median(seconds), 3),
        "spread_s": [round(min(seconds), 3), round(max(seconds), 3)],
        "cpu_s": round(statistics.median(each.cpu_s for each in runs), 3),
    }
    peak = max(each.peak_bytes for each in runs)
    if peak:
        summary["peak_mib"] = round(peak / 2**20, 1)
    return summary


def ratio(longer: Sequence[Run], shorter: Sequence[Run]) -> float:
    """Return how many times as long the first took, by medians."""
    return statistics.median(r.seconds for r in longer) / statistics.median(
        r.seconds for r in shorter
    )

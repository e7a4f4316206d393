"""
How long does the shell wait for ``pipegrid --version``, against a bare ``import click``?

With ``--library``: and a program for ``from pipegrid import Grid``, against Twisted's Deferreds alone?
Whole commands are measured by ``cold``.

Both run alternately, in pairs, as processes of their own; the figure is the median of the pairs' ratios, so
that whatever else the machine does meets both alike. It needs PipeGrid installed, for the console script.

    python -m misc.speedtest.startup [--pairs N] [--library] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import attrs

LIMIT = 1.5


@attrs.frozen
class Pair:
    """One run of each, in seconds."""

    version_s: float
    click_s: float

    @property
    def ratio(self) -> float:
        """How many times as long ``pipegrid --version`` took."""
        return self.version_s / self.click_s


def console_script() -> str | None:
    """Return the path of the ``pipegrid`` that belongs to this interpreter, or None."""
    return shutil.which("pipegrid", path=str(Path(sys.executable).parent))


def measure(script: str, pairs: int) -> list[Pair]:
    """Run each command once to warm up, then ``pairs`` times in turn."""
    version, click = [script, "--version"], [sys.executable, "-c", "import click"]
    _time(version)
    _time(click)
    return [Pair(_time(version), _time(click)) for _ in range(pairs)]


def _time(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _cpu(command: Sequence[str]) -> float:
    """Run a process; returns the CPU time that it used, in seconds."""
    process = subprocess.Popen(command)
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns 1 if the median ratio is above the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--pairs", type=int, default=21, help="[21]")
    parser.add_argument("--library", action="store_true", help="the library's imports, instead")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(arguments)
    if options.library:
        for line in ("from pipegrid import Grid", "from twisted.internet import defer, task"):
            command = [sys.executable, "-c", line]
            cpu_ms = 1000 * statistics.median(_cpu(command) for _ in range(options.pairs))
            print(f"{line:<42}{cpu_ms:6.1f} ms of CPU", file=out)
        return 0
    script = console_script()
    if script is None:
        print("startup: install PipeGrid into this environment first", file=sys.stderr)
        return 1
    pairs = measure(script, options.pairs)
    ratios = sorted(pair.ratio for pair in pairs)
    median = statistics.median(ratios)
    version_ms = 1000 * statistics.median(pair.version_s for pair in pairs)
    click_ms = 1000 * statistics.median(pair.click_s for pair in pairs)
    if options.json:
        figures = {"median": median, "low": ratios[0], "high": ratios[-1]}
        report = {"scenario": "startup", "pairs": len(pairs), "ratio": figures}
        print(json.dumps(report | {"version_ms": version_ms, "click_ms": click_ms}), file=out)
    else:
        print(f"pipegrid --version          {version_ms:6.1f} ms", file=out)
        print(f"python -c 'import click'    {click_ms:6.1f} ms", file=out)
        print(
            f"ratio {median:.2f} (median of {len(pairs)} pairs, {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}); limit {LIMIT}",
            file=out,
        )
    return 0 if median <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

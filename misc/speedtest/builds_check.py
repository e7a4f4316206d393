"""
Does ``compare`` tell a slower build from an equal one, on real runs?

    python -m misc.speedtest.builds_check [--runs 10] [--slow SECONDS] [--output DIR]

Runs the speed test as often as it is told with this build, and once with a copy that sleeps before each file
it stores. Then:

* each equal run is compared with the one before it, and with all before it: nothing may be called slower;
* the slow build is compared with the last equal run, and with all of them: it has to be called slower.

A first run does not count: each of the others follows one whose servers' files were just removed, which makes
new files dearer on ext4 (docs/reference-speed.md, "A trap in measuring").

One JSON line each. The status is 1 if any comparison came out wrong. It is a measurement: what two runs can
tell on a machine that does other things besides is in docs/explanation-speedtest-compare.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from misc.speedtest.processes import ROOT
from pipegrid.speedtest.run_comparison import compare
from pipegrid.speedtest.run_results import Run, parse_run

SCENARIOS = ("startup", "1x 200B", "10x 200B", "1MB", "10MB", "100x 200B at once")
RTT = "20ms"
RUN_S = 300.0

SLOWED = """

import time

_put = Grid.put


def _slow_put(*arguments, **settings):
    time.sleep({seconds})
    return _put(*arguments, **settings)


Grid.put = _slow_put
"""


def measure(source: Path, output: Path) -> Run:
    """Run the speed test of the build at ``source``, in a process of its own."""
    command = [sys.executable, "-m", "pipegrid.cli", "speedtest", "run", "-q", "--rtt", RTT]
    for name in SCENARIOS:
        command += ["--only", name]
    done = subprocess.run(
        [*command, "--output", str(output)],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_S,
    )
    if done.returncode:
        raise SystemExit(f"the speed test ended with {done.returncode}: {done.stderr.strip()}")
    found = output / "run.json"
    return parse_run(found.read_bytes(), str(found))


def slowed_copy(directory: Path, seconds: float) -> Path:
    """Make a copy of the package of which every put sleeps first; returns where to import it from."""
    source = directory / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    module = source / "pipegrid" / "grid" / "file_grid.py"
    module.write_text(module.read_text("utf-8") + SLOWED.format(seconds=seconds), "utf-8")
    return source


def judge(name: str, before: Sequence[Run], after: Run, wanted: bool) -> bool:
    """Compare, print a line, and return whether the answer was the one that is wanted."""
    found = compare(before, [after])
    right = found.regressed == wanted
    line = {
        "check": name,
        "runs_before": len(before),
        "slower": [f"{each.name} {each.direction} {each.percent}" for each in found.slower],
        "wanted": "slower" if wanted else "nothing slower",
        "kept": right,
    }
    print(json.dumps(line), flush=True)
    return right


def judgements(equal: Sequence[Run], slow: Run) -> Iterator[bool]:
    """Make all comparisons."""
    for index in range(1, len(equal)):
        one_before = equal[index - 1 : index]
        yield judge(f"run {index + 1} beside run {index}", one_before, equal[index], False)
        if index > 1:
            yield judge(f"run {index + 1} beside all before", equal[:index], equal[index], False)
    yield judge("slowed build beside the last run", equal[-1:], slow, True)
    yield judge("slowed build beside all runs", equal, slow, True)


def main(arguments: list[str] | None = None) -> None:
    """Run, compare, and exit with what came of it."""
    parser = argparse.ArgumentParser(
        description="Whether compare tells a slower build from an equal one."
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--slow", type=float, default=0.01, metavar="SECONDS", help="of sleep in each put"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the runs there")
    options = parser.parse_args(arguments)
    if options.runs < 2:
        parser.error("two runs are needed to compare any")
    with tempfile.TemporaryDirectory(prefix="builds-") as scratch:
        output = options.output or Path(scratch)
        slow_source = slowed_copy(Path(scratch, "slowed"), options.slow)
        print("a first run, which does not count", file=sys.stderr, flush=True)
        measure(ROOT / "src", output / "first")
        runs = []
        for index in range(options.runs):
            print(f"run {index + 1} of {options.runs}", file=sys.stderr, flush=True)
            runs.append(measure(ROOT / "src", output / f"equal-{index + 1:02}"))
        slow = measure(slow_source, output / "slowed")
    if not all(list(judgements(runs, slow))):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

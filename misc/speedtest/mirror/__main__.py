"""
``pipegrid mirror`` and other mirroring tools, in turns (A B A B) on the same web servers.

    python -m misc.speedtest.mirror [--only WORD]... [--rounds 5] [--scratch DIR] [--disk DIR]
                                    [--seed N] [--tiny] [--beside DIR]

Archives are made up (``archive``), servers are real (nginx, ``webserver``), the link in front of them is
emulated by a process of its own, and files are written to memory (``/dev/shm``), so that the tools are
compared and not the disk. Start-up counts, every file is hashed afterwards, and the first round of each
comparison does not count. With ``--beside``, ``pipegrid`` of another checkout is the only other tool.
``make mirror`` installs what Debian has of the peers; those that are not
there are named in the line.

One JSON line for each comparison: medians, spreads, CPU time with that of all children, the ratios, the
target where there is one, and the ceiling; then a table on standard error.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from misc.command import compile_package
from misc.ending import end_on_sigterm
from misc.scratch import scratch_directory
from misc.speedtest.mirror.again import durability, incremental, memory, verify_again
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.clone import clone
from misc.speedtest.mirror.faults import faults
from misc.speedtest.mirror.indexes import index_update
from misc.speedtest.mirror.librepo import rpm_clone
from misc.speedtest.mirror.patches import patches
from misc.speedtest.mirror.redirects import redirects
from misc.speedtest.mirror.tools import checked_out

MEMORY = Path("/dev/shm")

TINY = ("small", "tls-small", "faults", "incremental", "verify", "memory", "pdiff", "redirects")
"""Each kind of measurement once."""


def scenarios(disk: Path) -> dict[str, Callable[[Bench], None]]:
    """Return what can be measured, by the word for ``--only``."""
    return {
        "small": lambda bench: clone(bench, bench.small, 20.0, target=2.5),
        "slow": lambda bench: clone(bench, bench.small, 20.0, slow=True, target=40.0),
        "large": lambda bench: clone(bench, bench.large, 20.0, target=4.0),
        "far": lambda bench: clone(bench, bench.small, 100.0, target=7.0),
        "slow-start": lambda bench: clone(
            bench, bench.large, 20.0, shape=("--slow-start",), target=4.0
        ),
        "near": lambda bench: clone(bench, bench.large, 0.0),
        "tls-small": lambda bench: clone(bench, bench.small, 20.0, tls=True, target=2.5),
        "tls-large": lambda bench: clone(bench, bench.large, 20.0, tls=True, target=4.0),
        "faults": lambda bench: faults(bench, bench.large),
        "incremental": lambda bench: incremental(bench, bench.large),
        "verify": lambda bench: verify_again(bench, bench.large),
        "durability": lambda bench: durability(bench, bench.large, disk),
        "memory": lambda bench: memory(bench, bench.large),
        "pdiff": patches,
        "indexes": index_update,
        "rpm": rpm_clone,
        "redirects": lambda bench: redirects(bench, bench.large, 20.0),
    }


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a figure depends on besides."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "rounds": options.rounds,
        "seed": options.seed,
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return what people read: a line a comparison, with what matters of it."""
    rows = []
    for line in lines:
        rows.append(line["what"])
        for name, value in line.items():
            if isinstance(value, dict) and "median_s" in value:
                times = line.get("times_as_fast")
                factor = times.get(name) if isinstance(times, dict) else None
                behind = "" if factor is None else f"   {factor:6.2f} x"
                rows.append(
                    f"    {name:<16} {value['median_s']:8.3f} s   CPU {value['cpu_s']:7.3f} s{behind}"
                )
            elif name != "what" and value not in (None, [], {}) and not isinstance(value, dict):
                rows.append(f"    {name}: {value}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--only", action="append", metavar="WORD", help="one of the scenarios")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--scratch", type=scratch_directory, default=MEMORY if MEMORY.is_dir() else None
    )
    parser.add_argument("--disk", type=Path, help="where durability is measured; a real disk")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout")
    options = parser.parse_args(arguments)
    options.rounds = 1 if options.tiny else options.rounds
    end_on_sigterm()
    if not options.tiny:  # as an installed package is; else each run would do so again
        compile_package()
        if options.beside is not None:
            compileall.compile_dir(str(options.beside / "src"), quiet=2)
    with (
        tempfile.TemporaryDirectory(dir=options.scratch, prefix="pipegrid-mirror-") as scratch,
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
    ):
        bench = Bench(
            Path(scratch),
            random.Random(options.seed),
            options.rounds,
            options.tiny,
            environment(options),
            None if options.beside is None else checked_out(options.beside),
        )
        known = scenarios(Path(disk))
        for word in options.only or (TINY if options.tiny else known):
            if word not in known:
                parser.error(f"{word} is none of {', '.join(known)}")
            known[word](bench)
    print(table(bench.lines), file=sys.stderr)


if __name__ == "__main__":
    main()

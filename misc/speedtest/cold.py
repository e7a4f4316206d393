"""
How long does a cold command take, from the shell's call to the end of the process?

Ten real servers stand in ``servers.yaml``, behind a link of so long a round trip. Each ``put`` stores a new
file of 200 B and each ``get`` fetches one, as a process of its own: nothing is connected yet, nothing known
of the servers. The floor is three round trips (TCP, TLS 1.3, the request with its answer) and what Python and
its imports take; so a command is given the CPU time that it used itself, user and system, and what is left of
its time is told in round trips. Beside it stands what the interpreter takes with Twisted's reactor and TLS
alone.

    python -m misc.speedtest.cold [--rtt-ms MS] [--rounds N] [--servers N] [--json]

The status is 1 if the median of ``put`` took more than three round trips and the allowed CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import attrs

from misc.command import command, compile_package, environment
from misc.ending import end_on_sigterm
from misc.speedtest.processes import Servers, ping_s

ROUND_TRIPS = 3
"""TCP, TLS 1.3, and the request with its answer."""

LIMIT_CPU_S = 0.35
FILE_BYTES = 200
_FLOOR = "from twisted.internet import reactor, ssl"


class Failed(Exception):
    """A command failed, or gave other bytes; there is nothing to measure."""


@attrs.frozen
class Run:
    """
    One process.

    Attributes:
        wall_s: from its start to its end.
        cpu_s: that it used, user and system, with its threads.
    """

    wall_s: float
    cpu_s: float

    def round_trips(self, rtt_s: float) -> float:
        """Return what is left of its time, without that of the CPU, in round trips."""
        return (self.wall_s - self.cpu_s) / rtt_s


def run(line: Sequence[str]) -> tuple[Run, bytes]:
    """
    Run a process; returns what it took and printed.

    Raises:
        Failed: its status is not 0.
    """
    began = time.perf_counter()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, env=environment())
    assert process.stdout is not None
    with process.stdout as stdout:
        printed = stdout.read()
    _, code, usage = os.wait4(process.pid, 0)
    took = Run(time.perf_counter() - began, usage.ru_utime + usage.ru_stime)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise Failed(f"{' '.join(line)} gave {process.returncode}")
    return took, printed


def measure(servers: Servers, rounds: int, seed: int) -> dict[str, list[Run]]:
    """
    Run each command once to warm up, then so many times in turn.

    Raises:
        Failed: a command failed, or gave other bytes.
    """
    rng = random.Random(seed)
    runs: dict[str, list[Run]] = {"put": [], "get": [], "floor": []}
    file = servers.client.parent / "file"
    for number in range(rounds + 1):
        content = rng.randbytes(FILE_BYTES)
        file.write_bytes(content)
        put, printed = run(command(servers.client, "-q", "put", str(file)))
        cap = printed.decode("ascii").strip()
        got, back = run(command(servers.client, "-q", "get", cap))
        if back != content:
            raise Failed("get gave other bytes than were put")
        floor, _ = run([sys.executable, "-c", _FLOOR])
        if number:
            for name, each in (("put", put), ("get", got), ("floor", floor)):
                runs[name].append(each)
    return runs


def medians(runs: Sequence[Run], rtt_s: float) -> dict[str, float]:
    """Return the medians of what processes took."""
    return {
        "wall_s": round(statistics.median(each.wall_s for each in runs), 3),
        "cpu_s": round(statistics.median(each.cpu_s for each in runs), 3),
        "wall_rtts": round(statistics.median(each.wall_s for each in runs) / rtt_s, 2),
        "round_trips": round(statistics.median(each.round_trips(rtt_s) for each in runs), 2),
    }


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns 1 if the limit is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--rtt-ms", type=float, default=100.0, help="[100]")
    parser.add_argument("--rounds", type=int, default=11, help="[11]")
    parser.add_argument("--servers", type=int, default=10, help="[10]")
    parser.add_argument("--limit-cpu-s", type=float, default=LIMIT_CPU_S, help=f"[{LIMIT_CPU_S}]")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    compile_package()
    try:
        with Servers(options.servers, rtt_s=options.rtt_ms / 1000) as servers:
            assert servers.echo_port is not None
            rtt_s = statistics.median(ping_s(servers.echo_port, 5))
            runs = measure(servers, options.rounds, seed)
    except Failed as error:
        print(f"cold: {error}", file=sys.stderr)
        return 1
    figures = {name: medians(each, rtt_s) for name, each in runs.items()}
    limit_s = ROUND_TRIPS * rtt_s + options.limit_cpu_s
    kept = figures["put"]["wall_s"] <= limit_s
    if options.json:
        report = {"scenario": "cold", "rtt_s": round(rtt_s, 4), "rounds": options.rounds}
        print(
            json.dumps({**report, "seed": seed, **figures, "limit_s": round(limit_s, 3)}), file=out
        )
        return 0 if kept else 1
    print(f"a cold command, file of {FILE_BYTES} B, round trip {1000 * rtt_s:.1f} ms", file=out)
    for name in ("put", "get"):
        each = figures[name]
        print(
            f"  {name}    {each['wall_s']:.3f} s ({each['wall_rtts']:.2f} RTT):"
            f" CPU {each['cpu_s']:.3f} s, and {each['round_trips']:.2f} round trips",
            file=out,
        )
    floor_s = figures["floor"]["cpu_s"]
    print(
        f"  floor  {ROUND_TRIPS * rtt_s + floor_s:.3f} s:"
        f" CPU {floor_s:.3f} s (Twisted's reactor and TLS), and {ROUND_TRIPS} round trips",
        file=out,
    )
    print(f"  limit  {limit_s:.3f} s for put; median of {options.rounds}", file=out)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

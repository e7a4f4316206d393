"""
How many small files a second does ``put_many`` store on ten real servers, and ``read`` fetch from them?

    python -m misc.speedtest.many [--files N] [--bytes N] [--rtt-ms MS] [--rounds N] [--beside DIR] [--json]

Ten ``pipegrid serve`` processes over TLS behind a link of so long a round trip, one client, random files.
Connections are up, and the first two hundred files do not count. ``--beside`` names another checkout, another
version say: both are measured in turns, client and servers each of its own. Told are files a second, and the
processor time of a file, client's and servers'. A new client reads the files, ``READERS`` at a time.
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
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

WARM_FILES = 200
READERS = 400
_UNITS = {
    "files_per_s": "files/s stored",
    "client_ms": "ms client",
    "servers_ms": "ms servers",
    "gets_per_s": "files/s fetched",
    "get_client_ms": "ms client",
    "get_servers_ms": "ms servers",
}


def measure_once(files: int, size: int, rtt_s: float, servers: int) -> dict[str, float]:
    """Measure the version that this process imports; to be called once in a process."""
    from twisted.python.failure import Failure

    from misc import ending
    from pipegrid import Grid

    servers_class = _first(
        "pipegrid.speedtest.child_processes.Servers", "pipegrid.speedtest.processes.Servers"
    )
    figures: dict[str, float] = {}

    async def run(reactor: Any) -> None:
        with servers_class(servers, rtt_s=rtt_s, durability="batch") as running:
            grid = await Grid.open(reactor, running.client)
            _first(
                "pipegrid.reactor.process_settings.tune_gc",
                "pipegrid.reactor.collector.calm_collector",
            )()
            await grid.put_many([random.randbytes(size) for _ in range(WARM_FILES)])
            contents = [random.randbytes(size) for _ in range(files)]
            client_s, servers_s, began = time.process_time(), running.cpu_s(), time.perf_counter()
            outcomes = await grid.put_many(contents)
            figures["files_per_s"] = files / (time.perf_counter() - began)
            figures["client_ms"] = 1000 * (time.process_time() - client_s) / files
            figures["servers_ms"] = 1000 * (running.cpu_s() - servers_s) / files
            caps: list[Any] = []
            for outcome in outcomes:
                if isinstance(outcome, Failure) or outcome.happiness < min(7, servers):
                    raise SystemExit(f"a file was not stored: {outcome}")
                caps.append(outcome.cap)
            await grid.close()
            grid = await Grid.open(reactor, running.client)
            await _read_all(grid, caps[:WARM_FILES], contents)
            client_s, servers_s, began = time.process_time(), running.cpu_s(), time.perf_counter()
            await _read_all(grid, caps, contents)
            figures["gets_per_s"] = files / (time.perf_counter() - began)
            figures["get_client_ms"] = 1000 * (time.process_time() - client_s) / files
            figures["get_servers_ms"] = 1000 * (running.cpu_s() - servers_s) / files
            await grid.close()

    ending.run(run)
    return figures


async def _read_all(grid: Any, caps: Sequence[Any], contents: Sequence[bytes]) -> None:
    """Read files, and compare each with what was stored."""
    from twisted.internet.defer import Deferred, gatherResults

    left = iter(zip(caps, contents, strict=False))

    async def read_some() -> None:
        for cap, content in left:
            if await grid.read(cap) != content:
                raise SystemExit("a file was fetched with other bytes")

    await gatherResults(
        [Deferred.fromCoroutine(read_some()) for _ in range(READERS)], consumeErrors=True
    )


def _first(*names: str) -> Any:
    """Return the first of some attributes, each with its module, that the version that is measured has."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        with suppress(ImportError):
            return getattr(import_module(module), attribute)
    raise SystemExit(f"this version has none of {', '.join(names)}")


def measure_apart(checkout: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one process that imports a checkout."""
    line = [sys.executable, str(Path(__file__).resolve()), "--once"]
    for name in ("files", "bytes", "rtt_ms", "servers"):
        line += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    found = os.pathsep.join([str(checkout / "src"), str(Path(__file__).resolve().parents[2])])
    done = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": found}, check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0].strip())
    parser.add_argument("--files", type=int, default=2000, help="[2000]")
    parser.add_argument("--bytes", type=int, default=1000, help="[1000]")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="[20]")
    parser.add_argument("--servers", type=int, default=10, help="[10]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.once:
        found = measure_once(options.files, options.bytes, options.rtt_ms / 1000, options.servers)
        print(json.dumps(found), file=out)
        return
    checkouts = [Path(__file__).resolve().parents[2]]
    if options.beside is not None:
        checkouts.insert(0, options.beside.resolve())
    rounds = [[measure_apart(each, options) for each in checkouts] for _ in range(options.rounds)]
    for place, checkout in enumerate(checkouts):
        runs = [each[place] for each in rounds]
        if options.json:
            print(json.dumps({"checkout": str(checkout), "runs": runs}), file=out)
            continue
        print(checkout, file=out)
        for name, unit in _UNITS.items():
            values = [run[name] for run in runs]
            middle = statistics.median(values)
            print(f"  {middle:8.2f} {unit} ({min(values):.2f} to {max(values):.2f})", file=out)


if __name__ == "__main__":
    main()

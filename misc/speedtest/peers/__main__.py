"""
PipeGrid and Tahoe-LAFS's gateway, in turns (A B A B) on the same ten storage servers of Tahoe-LAFS.

    python -m misc.speedtest.peers [--rtt MS]... [--only TEXT] [--rounds 5] [--against https|foolscap]...
                                   [--protocol https|foolscap] [--tiny] [--profile FILE]

``$TAHOE`` is the command of Tahoe-LAFS (``make interop`` installs it in ``.venv-tahoe``). ``Grid`` runs in
this process; the gateway is a process that this one asks over loopback, as its users do. The servers are
behind one relay that adds the round trip to both; at 0 ms there is nothing to add, and both speak with the
servers directly. Connections are up: before each turn the client stores and fetches a file that does not
count, since servers close connections that were idle for a minute.

Each file is random and fresh, is fetched by the client that stored it, and is compared when it has come
back, outside the time that counts. Between the turns the servers' shares are removed. The first round of
each scenario does not count. The gateway speaks HTTPS, as 1.20 does by default; at 0 ms, 100 MB are
measured against a gateway that speaks Foolscap, too.

One JSON line for each scenario and direction: both medians and spreads, the ratio, CPU time of the client
(for Tahoe-LAFS: its gateway's) and of the servers; then a table on standard error.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from misc import ending
from misc.scratch import scratch_directory
from misc.speedtest import processes
from misc.speedtest.peers.clients import Client, GatewayClient, PipegridClient, run_all
from misc.speedtest.peers.contest import (
    GET,
    HUNDRED_MEGABYTES,
    PUT,
    SCENARIOS,
    TINY,
    Comparison,
    Samples,
    Scenario,
    table,
)
from misc.speedtest.peers.nodes import (
    HTTPS,
    PROTOCOLS,
    Address,
    Gateway,
    GatewayFailed,
    StorageNodes,
    servers_file,
)
from pipegrid import Grid
from pipegrid.core import erasure
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.reactor.process_settings import tune_gc
from pipegrid.speedtest.benchmark_clients import Comparing

SERVERS = 10
HAPPY = 7
RTTS_MS = (0.0, 20.0, 100.0)
WARMING_BYTES = 1000
ATTEMPTS = 5
"""A gateway gives up when a server is busy for 15 s, as they are when this machine does other things, too."""


class Bench:
    """The servers, and rounds on them."""

    def __init__(
        self, servers: StorageNodes, rng: random.Random, profile: cProfile.Profile | None = None
    ) -> None:
        self._servers = servers
        self._rng = rng
        self._profile = profile

    async def compare(
        self, clients: Sequence[Client], scenario: Scenario, rounds: int
    ) -> dict[tuple[str, str], Samples]:
        """Return what both took, by client and direction."""
        for client in clients:
            await self._turn_again(client, scenario, Samples(), Samples())
        found = {(client.name, way): Samples() for client in clients for way in (PUT, GET)}
        for _ in range(rounds):
            for client in clients:
                await self._turn_again(
                    client, scenario, found[client.name, PUT], found[client.name, GET]
                )
        return found

    async def _turn_again(
        self, client: Client, scenario: Scenario, put: Samples, get: Samples
    ) -> None:
        """Take a turn, again if the gateway gives up; a turn that fails leaves no sample."""
        for attempt in range(ATTEMPTS):
            new_put, new_get = Samples(), Samples()
            try:
                await self._turn(client, scenario, new_put, new_get)
            except GatewayFailed:
                if attempt == ATTEMPTS - 1:
                    raise
                (get if new_put.seconds else put).failed += 1
            else:
                put.extend(new_put)
                get.extend(new_get)
                return

    async def _turn(self, client: Client, scenario: Scenario, put: Samples, get: Samples) -> None:
        """Store fresh files, fetch them, and note what both took."""
        files = [self._rng.randbytes(scenario.size) for _ in range(scenario.count)]
        await self._warm(client)
        puts = [lambda file=file: client.put(file) for file in files]
        caps = await self._timed(client, put, puts, scenario.at_once)
        sinks = [Comparing(file) for file in files]
        await self._warm(client)
        gets = [
            lambda cap=cap, sink=sink: client.get(cap, sink)
            for cap, sink in zip(caps, sinks, strict=True)
        ]
        await self._timed(client, get, gets, scenario.at_once)
        for sink in sinks:
            sink.check()
        self._servers.forget()

    async def _warm(self, client: Client) -> None:
        await client.warm()
        data = self._rng.randbytes(WARMING_BYTES)
        sink = Comparing(data)
        await client.get(await client.put(data), sink)
        sink.check()
        gc.collect()

    async def _timed(
        self, client: Client, samples: Samples, calls: Sequence[Any], at_once: bool
    ) -> list[Any]:
        client_s, servers_s = client.cpu_s(), self._servers_cpu_s()
        profile = self._profile if client.name == PipegridClient.name else None
        if profile is not None:
            profile.enable()
        began = time.perf_counter()
        results = await run_all(calls, at_once)
        samples.seconds.append(time.perf_counter() - began)
        if profile is not None:
            profile.disable()
        samples.client_cpu_s.append(client.cpu_s() - client_s)
        samples.servers_cpu_s.append(self._servers_cpu_s() - servers_s)
        return results

    def _servers_cpu_s(self) -> float:
        return sum(processes.cpu_s(node.pid) for node in self._servers.nodes)


def wanted(rtt_ms: float, against: str, scenario: Scenario, options: argparse.Namespace) -> bool:
    """Return whether a comparison is to be made."""
    if options.only not in scenario.name:
        return False
    if options.against:
        return against in options.against
    return against == HTTPS or (scenario is HUNDRED_MEGABYTES and rtt_ms == 0)


def start_relay(stack: ExitStack, addresses: Sequence[Address], rtt_ms: float) -> list[Address]:
    """Return where the servers are behind a link; 0 ms are no link."""
    if rtt_ms == 0:
        return list(addresses)
    targets = [f"{each.nurl.host}:{each.nurl.port}" for each in addresses]
    program = ["-m", "pipegrid.speedtest.child_processes", "--relay", str(rtt_ms / 1000), *targets]
    relay = stack.enter_context(processes.running([sys.executable, *program]))
    *ports, _echo = json.loads(processes.first_line(relay))
    return [each.at(port) for each, port in zip(addresses, ports, strict=True)]


def make_client(directory: Path, addresses: Sequence[Address], protocol: str) -> None:
    """Make a directory of PipeGrid's that names servers."""
    create_client(
        directory,
        params=Params(),
        happy=HAPPY,
        files={SERVERS_NAME: servers_file(addresses, protocol)},
    )


async def measure(
    reactor: Any,
    servers: StorageNodes,
    scratch: Path,
    options: argparse.Namespace,
    rng: random.Random,
    profile: cProfile.Profile | None,
) -> list[Comparison]:
    """Make all comparisons; each is printed as soon as it is there."""
    done: list[Comparison] = []
    bench = Bench(servers, rng, profile)
    scenarios = TINY if options.tiny else SCENARIOS
    for rtt_ms in options.rtt:
        for against in PROTOCOLS:
            chosen = [each for each in scenarios if wanted(rtt_ms, against, each, options)]
            if not chosen:
                continue
            place = scratch / f"{rtt_ms:g}-{against}"
            with ExitStack() as stack:
                addresses = start_relay(stack, servers.addresses(), rtt_ms)
                make_client(place / "client", addresses, options.protocol)
                gateway = Gateway(place / "gateway", addresses, against, Params(), HAPPY)
                tahoe = GatewayClient(gateway, reactor, max(each.count for each in chosen))
                stack.callback(tahoe.close)  # when nobody can be asked any more: it waits
                stack.enter_context(gateway)
                grid = await Grid.open(reactor, place / "client")
                try:
                    for scenario in chosen:
                        found = await bench.compare(
                            [PipegridClient(grid), tahoe], scenario, options.rounds
                        )
                        for way in (PUT, GET):
                            comparison = Comparison(
                                rtt_ms,
                                options.protocol,
                                against,
                                scenario,
                                way,
                                found[PipegridClient.name, way],
                                found[GatewayClient.name, way],
                            )
                            line = {**comparison.as_json(), **environment(options)}
                            print(json.dumps(line), flush=True)
                            done.append(comparison)
                finally:
                    await grid.close()
    return done


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a figure depends on besides."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return {
        "servers": SERVERS,
        "seed": options.seed,
        "commit": commit.stdout.strip() or None,
        "python": platform.python_version(),
        "erasure": erasure.library(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rtt", type=float, action="append", metavar="MS", help="[0, 20, 100]")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios with it in the name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", choices=PROTOCOLS, action="append", help="the gateway's")
    parser.add_argument("--protocol", choices=PROTOCOLS, default=HTTPS, help="PipeGrid's")
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the servers' directories are made"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of PipeGrid's turns")
    options = parser.parse_args(arguments)
    options.rtt = options.rtt or ([5.0] if options.tiny else list(RTTS_MS))
    options.rounds = 1 if options.tiny else options.rounds
    profile = cProfile.Profile() if options.profile else None

    async def run(reactor: Any) -> None:
        rng = random.Random(options.seed)
        tune_gc()  # as the command does
        with (
            tempfile.TemporaryDirectory(dir=options.scratch) as scratch,
            StorageNodes(Path(scratch), SERVERS) as servers,
        ):
            done = await measure(reactor, servers, Path(scratch), options, rng, profile)
        print(table(done), file=sys.stderr)
        if profile is not None:
            profile.dump_stats(options.profile)

    ending.run(run)


if __name__ == "__main__":
    main()

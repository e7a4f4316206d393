"""
Mutable files and directories of PipeGrid and of Tahoe-LAFS's gateway, in turns on the same ten servers of
Tahoe-LAFS: ``operations`` says what, ``contest`` what is promised.

    python -m misc.speedtest.peers.mutables [--rtt MS]... [--only TEXT]... [--rounds 5] [--tiny]
                                            [--protocol https|foolscap] [--against https|foolscap]
                                            [--profile FILE]

As ``misc.speedtest.peers`` has it: ``Grid`` runs in this process, the gateway is a process that is asked over
loopback, both reach the servers through one relay that adds the round trip, and connections are up. A third
client, a ``Grid`` that reaches the servers directly, makes what is to be read or changed, each time anew and
for each of the two, so that neither knows anything of it; and when it was changed reads it again, outside the
time that counts: every byte and every cap is compared. Where ``warm`` is written, the same client changed
the same thing just before.

The first round does not count. One JSON line for each operation, then a table on standard error.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import random
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
from misc.speedtest.peers.__main__ import (
    ATTEMPTS,
    HAPPY,
    SERVERS,
    environment,
    make_client,
    start_relay,
)
from misc.speedtest.peers.contest import Comparison, Samples, Scenario, table
from misc.speedtest.peers.nodes import HTTPS, PROTOCOLS, Gateway, GatewayFailed, StorageNodes
from misc.speedtest.peers.operations import (
    OPERATIONS,
    TINY,
    GatewayFiles,
    MutableClient,
    Operation,
    PipegridFiles,
    Subject,
)
from pipegrid import Grid
from pipegrid.core.encoding_parameters import Params
from pipegrid.reactor.process_settings import tune_gc

RTT_MS = 100.0


class Bench:
    """
    The servers, and turns on them.

    Args:
        maker: makes what the clients change, and reads what came of it.
    """

    def __init__(
        self,
        servers: StorageNodes,
        maker: Grid,
        rng: random.Random,
        profile: cProfile.Profile | None = None,
    ) -> None:
        self._servers = servers
        self._maker = maker
        self._rng = rng
        self._profile = profile

    async def compare(
        self, clients: Sequence[MutableClient], operation: Operation, rounds: int
    ) -> list[Samples]:
        """Return what an operation took each of the clients."""
        found = [Samples() for _ in clients]
        for turn in range(rounds + 1):
            for client, samples in zip(clients, found, strict=True):
                kept = samples if turn else Samples()
                await self._turn_again(client, operation, kept)
        self._servers.forget()
        return found

    async def _turn_again(
        self, client: MutableClient, operation: Operation, samples: Samples
    ) -> None:
        """Take a turn, again if the gateway gives up."""
        for attempt in range(ATTEMPTS):
            try:
                await self._turn(client, operation, samples)
            except GatewayFailed:  # noqa: PERF203  it is rare
                samples.failed += 1
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    async def _turn(self, client: MutableClient, operation: Operation, samples: Samples) -> None:
        subject = Subject(self._maker, self._rng)
        await operation.prepare(subject)
        await client.warm()
        for call in operation.before:
            await call(client, subject)
        gc.collect()
        client_s, servers_s = client.cpu_s(), self._servers_cpu_s()
        profile = self._profile if isinstance(client, PipegridFiles) else None
        if profile is not None:
            profile.enable()
        began = time.perf_counter()
        for _ in range(operation.times):
            await operation.work(client, subject)
        elapsed_s = time.perf_counter() - began
        if profile is not None:
            profile.disable()
        await operation.check(subject)
        samples.seconds.append(elapsed_s / operation.times)
        samples.client_cpu_s.append((client.cpu_s() - client_s) / operation.times)
        samples.servers_cpu_s.append((self._servers_cpu_s() - servers_s) / operation.times)

    def _servers_cpu_s(self) -> float:
        return sum(processes.cpu_s(node.pid) for node in self._servers.nodes)


async def measure(
    reactor: Any,
    servers: StorageNodes,
    scratch: Path,
    options: argparse.Namespace,
    profile: cProfile.Profile | None,
) -> list[Comparison]:
    """Make all comparisons; each is printed as soon as it is there."""
    done: list[Comparison] = []
    everything = TINY if options.tiny else OPERATIONS
    chosen = [each for each in everything if any(only in each.name for only in options.only)]
    make_client(scratch / "maker", servers.addresses(), HTTPS)
    for rtt_ms in options.rtt:
        place = scratch / f"{rtt_ms:g}"
        with ExitStack() as stack:
            addresses = start_relay(stack, servers.addresses(), rtt_ms)
            make_client(place / "client", addresses, options.protocol)
            gateway = Gateway(place / "gateway", addresses, options.against, Params(), HAPPY)
            tahoe = GatewayFiles(stack.enter_context(gateway), reactor)
            stack.callback(tahoe.close)
            grids: list[Grid] = []
            try:
                for directory in (scratch / "maker", place / "client"):
                    grids.append(await Grid.open(reactor, directory))  # noqa: PERF401
                maker, grid = grids
                bench = Bench(servers, maker, random.Random(options.seed), profile)
                for operation in chosen:
                    ours, theirs = await bench.compare(
                        [PipegridFiles(grid), tahoe], operation, options.rounds
                    )
                    comparison = Comparison(
                        rtt_ms,
                        options.protocol,
                        options.against,
                        Scenario(operation.what, 0),
                        operation.verb,
                        ours,
                        theirs,
                    )
                    line = {**comparison.as_json(), **environment(options)}
                    print(json.dumps(line), flush=True)
                    done.append(comparison)
            finally:
                for each in grids:
                    await each.close()
    return done


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--rtt", type=float, action="append", metavar="MS", help="[100]")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="operations with it in the name"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", choices=PROTOCOLS, default=HTTPS, help="the gateway's")
    parser.add_argument("--protocol", choices=PROTOCOLS, default=HTTPS, help="PipeGrid's")
    parser.add_argument(
        "--scratch", type=scratch_directory, help="where the servers' directories are made"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--tiny", action="store_true", help="only show that it works")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of PipeGrid's turns")
    options = parser.parse_args(arguments)
    options.only = options.only or [""]
    options.rtt = options.rtt or ([5.0] if options.tiny else [RTT_MS])
    options.rounds = 1 if options.tiny else options.rounds
    profile = cProfile.Profile() if options.profile else None

    async def run(reactor: Any) -> None:
        tune_gc()  # as the command does
        with (
            tempfile.TemporaryDirectory(dir=options.scratch) as scratch,
            StorageNodes(Path(scratch), SERVERS) as servers,
        ):
            done = await measure(reactor, servers, Path(scratch), options, profile)
        print(table(done), file=sys.stderr)
        if profile is not None:
            profile.dump_stats(options.profile)

    ending.run(run)


if __name__ == "__main__":
    main()

"""Ten servers of either kind behind one link, while a context lasts; one of them can be emptied."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from misc.speedtest import processes
from misc.speedtest.peers.nodes import HTTPS, Address, Gateway, StorageNodes, servers_file
from misc.speedtest.processes import LOOPBACK, Servers, cpu_s
from misc.speedtest.trees.sides import Pipegrid, Runner, Tahoe, gateway_cpu
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME

SERVERS = 10
HAPPY = 7


@attrs.frozen
class World:
    """
    Servers, and who stores on them.

    Attributes:
        name: whose servers they are.
        stores: where each server has its shares.
        tahoe: None on servers that it is not measured with.
    """

    name: str
    stores: tuple[Path, ...]
    pipegrid: Pipegrid
    tahoe: Tahoe | None

    def empty(self, number: int) -> None:
        """Remove all whole shares of one server, behind its back."""
        store = self.stores[number]
        for path in store.iterdir():
            if path.name != "incoming":
                shutil.rmtree(path)

    def holding(self) -> list[int]:
        """Say which servers have whole shares; a repair may have put what one lost elsewhere."""
        return [n for n, store in enumerate(self.stores) if any(store.glob("??/*/*"))]

    def empty_any(self, rng: random.Random) -> None:
        """Empty one server that has whole shares, any of them."""
        self.empty(rng.choice(self.holding()))

    def forget(self) -> None:
        """Remove all whole shares of all, and what the client knows of backups."""
        self.pipegrid.forget()
        for number, store in enumerate(self.stores):
            if store.is_dir():
                self.empty(number)


@contextmanager
def ours(scratch: Path, rtt_s: float, yielding: int) -> Iterator[World]:
    """Start servers of ours; how far they stand back: see ``Servers``."""
    with Servers(
        SERVERS, rtt_s=rtt_s, durability="batch", scratch=scratch, yielding=yielding
    ) as running:
        stores = tuple(each / "storage" / "shares" for each in running.directories)
        runner = Runner(running.cpu_s)
        yield World("ours", stores, Pipegrid(running.client, runner), None)


@contextmanager
def tahoes(
    scratch: Path, rtt_s: float, protocol: str = HTTPS, against: str = HTTPS
) -> Iterator[World]:
    """Start servers and a gateway of Tahoe-LAFS's; PipeGrid speaks one protocol, the gateway ``against``."""
    with ExitStack() as stack:
        nodes = stack.enter_context(StorageNodes(scratch / "servers", SERVERS))
        addresses = nodes.addresses()
        targets = [f"{each.nurl.host}:{each.nurl.port}" for each in addresses]
        program = ["-m", "pipegrid.speedtest.child_processes", "--relay", str(rtt_s), *targets]
        relay = stack.enter_context(processes.running([sys.executable, *program]))
        *ports, _echo = json.loads(processes.first_line(relay))
        behind: list[Address] = [each.at(port) for each, port in zip(addresses, ports, strict=True)]
        client = scratch / "client"
        create_client(
            client,
            params=Params(),
            happy=HAPPY,
            files={SERVERS_NAME: servers_file(behind, protocol)},
        )
        gateway = Gateway(scratch / "gateway", behind, against, Params(), HAPPY)
        stack.enter_context(gateway)

        def others() -> float:
            return cpu_s(relay.pid) + sum(cpu_s(node.pid) for node in nodes.nodes)

        pipegrid = Pipegrid(client, Runner(others))
        tahoe = Tahoe(gateway, Runner(others, gateway_cpu(gateway)), pipegrid)
        yield World("Tahoe-LAFS's", tuple(each.shares for each in nodes.nodes), pipegrid, tahoe)


__all__ = ["LOOPBACK", "World", "ours", "tahoes"]

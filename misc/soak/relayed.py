"""Storage servers in this process, each behind a relay, and clients' directories that name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IProtocolFactory

from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.wire import server_address


class RelayedServers:
    """
    Such servers, and a client of them.

    Args:
        happy: of clients.
        relay_to: makes what relays connections to a port.

    Attributes:
        nodes: the servers.
        client: a client's directory.
    """

    def __init__(
        self,
        reactor: Any,
        scratch: Path,
        servers: int,
        params: Params,
        happy: int,
        relay_to: Callable[[int], IProtocolFactory],
    ) -> None:
        self.reactor = reactor
        self.params = params
        self.nodes = [
            StorageNode(
                reactor,
                ServeSettings(
                    directory=scratch / f"node{number}",
                    port="tcp:0:interface=127.0.0.1",
                    durability="none",
                ),
            )
            for number in range(servers)
        ]
        self.client = scratch / "client"
        self._happy = happy
        self._relay_to = relay_to
        self._relays: list[Any] = []

    async def start(self) -> None:
        """Start all."""
        await gatherResults([node.start() for node in self.nodes])
        for node in self.nodes:
            relay_to = self._relay_to(server_address.parse_nurl(node.nurl).port)
            self._relays.append(self.reactor.listenTCP(0, relay_to, interface="127.0.0.1"))
        self.make_client(self.client)

    def make_client(self, directory: Path, foolscap: bool = False) -> None:
        """Make a client's directory, with secrets of its own."""
        lines = ["storage:"]
        for number, (node, relay) in enumerate(zip(self.nodes, self._relays, strict=True)):
            port = relay.getHost().port
            if foolscap:
                there = server_address.parse_furl(node.furl)
                address = server_address.Furl(
                    there.tub_id, (f"tcp:127.0.0.1:{port}",), there.swissnum
                )
                said = [f'      anonymous-storage-FURL: "{address}"']
            else:
                relayed = attrs.evolve(server_address.parse_nurl(node.nurl), port=port)
                said = ["      anonymous-storage-NURLs:", f'        - "{relayed}"']
            lines += [f"  s{number}:", "    ann:", *said]
        files = {SERVERS_NAME: "\n".join(lines) + "\n"}
        create_client(directory, params=self.params, happy=self._happy, files=files)

    def stop(self) -> Deferred[None]:
        """End all. No coroutine, which ``addCleanup`` of the oldest Twisted would not await."""

        async def stop() -> None:
            for relay in self._relays:
                await relay.stopListening()
            await gatherResults([node.stop() for node in self.nodes])

        return Deferred.fromCoroutine(stop())

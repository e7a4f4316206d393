"""
A server with several NURLs, over real sockets: where one does not work, another is used at once.

How soon that is, ``tests.http11.test_dialer`` and ``tests.transport.test_failover`` measure in virtual time.
Here an attempt at one address may take longer than the test does, so that nothing waits for its end.
"""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.transport.foolscap import client as foolscap_client
from pipegrid.transport.gbs import client as gbs_client
from pipegrid.wire import server_address

reactor: Any = installed_reactor

PATIENT_S = 10_000.0
"""For a connection; a second attempt at the same address comes after a quarter of it."""


class Silent(Protocol):
    """Takes connections, and says nothing."""


class AddressesTests(TestCase):
    """The second NURL is the server's; what the first leads to differs."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        for module, name in ((gbs_client, "GbsSettings"), (foolscap_client, "FoolscapSettings")):
            made = getattr(module, name)
            self.patch(module, name, partial(made, connect_timeout_s=PATIENT_S))
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.directory = Path(self.mktemp())
        self.stack = ExitStack()
        self.node = StorageNode(
            reactor,
            ServeSettings(
                directory=self.directory / "node",
                port="tcp:0:interface=127.0.0.1",
                durability="none",
            ),
        )
        await self.node.start()
        self.good = server_address.parse_nurl(self.node.nurl)

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        self.stack.close()
        await self.node.stop()
        await flushEventualQueue()

    async def store(self, name: str, addresses: dict[str, Any], protocol: str = "https") -> None:
        """Store a file on a server with these addresses, of which one by this protocol works."""
        entries = {"alice": {"ann": addresses}}
        create_client(
            self.directory / name,
            params=Params(1, 1),
            happy=1,
            files={SERVERS_NAME: json.dumps({"storage": entries})},
        )
        grid = await Grid.open(reactor, self.directory / name)
        try:
            await grid.put(b"x" * 1000)
            (status,) = await grid.status()
            self.assertEqual((status.reachable, status.protocol), (True, protocol), status)
        finally:
            await grid.close()

    def full_port(self) -> int:
        """Return a port whose queue is full: what more is sent to it is swallowed."""
        listening = self.stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        port = int(listening.getsockname()[1])
        for _ in range(4):
            waiting = self.stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        return port

    def test_one_that_does_not_work(self) -> Deferred[None]:
        """Refused, swallowed, or taken by somebody who says nothing: the file is stored all the same."""
        return Deferred.fromCoroutine(self._test())

    async def _test(self) -> None:
        for name, port in self.bad_ports():
            nurls = [str(attrs.evolve(self.good, port=port)), str(self.good)]
            await self.store(name, {"anonymous-storage-NURLs": nurls})

    def test_the_furl_where_no_nurl_works(self) -> Deferred[None]:
        """The server is spoken to over Foolscap then."""
        return Deferred.fromCoroutine(self._test_furl())

    async def _test_furl(self) -> None:
        furl = {"anonymous-storage-FURL": self.node.furl}
        for name, port in self.bad_ports():
            nurls = [str(attrs.evolve(self.good, port=port))]
            await self.store(name, {**furl, "anonymous-storage-NURLs": nurls}, "foolscap")

    def test_nurls_with_other_keys_and_secrets(self) -> Deferred[None]:
        """Those of an earlier key, or with an earlier secret, are tried, and the right one is used."""
        return Deferred.fromCoroutine(self._test_others())

    async def _test_others(self) -> None:
        (_, refused), *_ = self.bad_ports()
        good = str(self.good)
        for name, nurl in (
            ("key", attrs.evolve(self.good, spki_hash=b"k" * 32)),
            ("secret", attrs.evolve(self.good, swissnum="earlier")),
            ("down", attrs.evolve(self.good, spki_hash=b"k" * 32, port=refused)),
        ):
            await self.store(name, {"anonymous-storage-NURLs": [str(nurl), good]})
            furl = {"anonymous-storage-FURL": self.node.furl}
            wrong = {**furl, "anonymous-storage-NURLs": [str(nurl)]}
            await self.store(f"{name} furl", wrong, "foolscap")

    def bad_ports(self) -> list[tuple[str, int]]:
        """Return ports that refuse, swallow, and take connections without saying anything."""
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            refused = unused.getsockname()[1]
        silent = reactor.listenTCP(0, Factory.forProtocol(Silent), interface="127.0.0.1")
        self.addCleanup(silent.stopListening)
        return [
            ("refused", refused),
            ("swallowed", self.full_port()),
            ("slow", silent.getHost().port),
        ]

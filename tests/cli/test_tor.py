"""Commands that reach their servers through a SOCKS5 proxy alone: there is no network besides it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from foolscap.api import flushEventualQueue
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import SkipTest, TestCase

import pipegrid
from pipegrid.core.encoding_parameters import Params
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import CONFIG_NAME, SERVERS_NAME
from pipegrid.server.serve import ServeSettings, StorageNode
from tests.no_network import run_without_network, unshare
from tests.socks_proxy import SocksProxy

reactor: Any = installed_reactor

SETTINGS = """
[node]
reveal-IP-address = false
[connections]
tcp = tor
[tor]
socks.port = unix:{path}"""


class NoNetworkTests(TestCase):
    """Three servers outside of the namespace of the commands, behind a proxy's socket file."""

    timeout = 300

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        if not unshare():
            raise SkipTest("this system gives no network namespaces")
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(shutil.rmtree, self.home)
        self.environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(pipegrid.__file__).parent.parent),
        }
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.nodes = [
            StorageNode(
                reactor,
                ServeSettings(
                    directory=self.home / f"node{number}",
                    port="tcp:0:interface=127.0.0.1",
                    durability="none",
                ),
            )
            for number in range(3)
        ]
        await gatherResults([node.start() for node in self.nodes])
        self.proxy = SocksProxy(reactor, {f"n{number}.onion": "127.0.0.1" for number in range(3)})
        listening = reactor.listenUNIX(str(self.home / "socks"), self.proxy)
        self.addCleanup(listening.stopListening)

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._tear_down())

    async def _tear_down(self) -> None:
        await gatherResults([node.stop() for node in self.nodes])
        await flushEventualQueue()
        await deferLater(reactor, 0.1)  # a server's pauses between Foolscap calls end

    def client(self, name: str, foolscap: bool, settings: str) -> None:
        """Make a client's directory."""
        entries = {}
        for number, node in enumerate(self.nodes):
            onion = f"n{number}.onion"
            before, _, rest = node.furl.partition("@")
            furl = f"{before}@tor:{onion}:{rest.split(':')[-1]}"
            nurl = node.nurl.replace("pb:", "pb+tor:").replace("127.0.0.1", onion)
            ann: dict[str, Any] = {"anonymous-storage-FURL": furl}
            ann |= {} if foolscap else {"anonymous-storage-NURLs": [nurl]}
            entries[f"s{number}"] = {"ann": ann}
        place = self.home / name
        files = {SERVERS_NAME: json.dumps({"storage": entries})}
        create_client(place, params=Params(2, 3), happy=3, files=files)
        path = place / CONFIG_NAME
        path.write_text(path.read_text() + settings.format(path=self.home / "socks"))

    async def use(self, *arguments: str, status: int = 0, sent: int = 0) -> tuple[bytes, str]:
        """Run a command without a network; returns what it printed."""
        found, out, err, attempts = await deferToThread(
            run_without_network,
            *(sys.executable, "-m", "pipegrid.cli", *arguments),
            cwd=self.home,
            env=self.environment,
        )
        self.assertEqual(found, status, err)
        self.assertEqual(attempts > 0, sent > 0, (attempts, err))
        return out, err

    def test_everything_goes_through_the_proxy(self) -> Deferred[None]:
        """Put, get, a tree, a backup and status, over both protocols; 0 packets are sent past it."""
        return Deferred.fromCoroutine(self._test_everything())

    async def _test_everything(self) -> None:
        (self.home / "small").write_bytes(b"x" * 200)
        (self.home / "large").write_bytes(os.urandom(10_000_000))
        (self.home / "tree").mkdir()
        (self.home / "tree/a").write_bytes(b"a" * 5000)
        for name, foolscap in (("https", False), ("foolscap", True)):
            self.client(name, foolscap, SETTINGS)
            for file in ("small", "large"):
                cap, _ = await self.use("-d", name, "-q", "put", file)
                data, _ = await self.use("-d", name, "-q", "get", cap.decode().strip())
                self.assertEqual(data, (self.home / file).read_bytes())
        for command in ("put -r tree", "backup tree", "status"):
            await self.use("-d", "https", "-q", *command.split(" "))
        self.assertEqual({host for host, _ in self.proxy.asked}, {f"n{n}.onion" for n in range(3)})

    def test_what_is_counted(self) -> Deferred[None]:
        """An attempt to connect without the proxy is noticed; nothing is attempted when it is refused."""
        return Deferred.fromCoroutine(self._test_counted())

    async def _test_counted(self) -> None:
        self.client("direct", False, "")
        path = self.home / "direct" / SERVERS_NAME
        path.write_text(path.read_text().replace("pb+tor:", "pb:").replace("n0.onion", "192.0.2.1"))
        await self.use("-d", "direct", "-q", "status", status=3, sent=1)
        self.client("refused", False, SETTINGS.replace("tcp = tor", "tcp = tcp"))
        _, err = await self.use("-d", "refused", "-q", "status", status=2)
        self.assertIn("reveal-IP-address is false, but", err)
        self.client("nowhere", False, SETTINGS + ".none")
        _, err = await self.use("-d", "nowhere", "-q", "status", status=3)

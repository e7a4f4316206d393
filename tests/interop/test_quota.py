"""
A quota that is reached in the middle of a put: the server refuses, others take the shares, nothing is lost.

With ``pipegrid serve`` as processes, over HTTPS and Foolscap, with this client and with Tahoe-LAFS's own.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import base32
from pipegrid.grid.client_paths import SERVERS_NAME
from tests.interop.processes import (
    Gateway,
    Process,
    make_node,
    pipegrid,
    run_pipegrid,
    until,
)

SIZE = 400_000
SHARE = SIZE // 2
QUOTA = 3 * SHARE + SHARE // 2  # three shares fit
FILES = 5
SERVERS = 4

_ADDRESSES = re.compile(r"^(pb://\S+#v=1)\n(pb://\S+@tcp:\S+)$", re.M)


class QuotaServer(Process):
    """``pipegrid serve``, perhaps with a quota."""

    def __init__(self, directory: Path, port: int, *options: str) -> None:
        super().__init__(
            directory,
            *(sys.executable, "-m", "pipegrid.cli", "-d", str(directory), "serve"),
            *("--port", f"tcp:{port}:interface=127.0.0.1", *options),
        )

    def addresses(self) -> tuple[str, str]:
        """Return its NURL and its fURL."""
        found = until(lambda: _ADDRESSES.search(self.log()), "the addresses", self)
        return found[1], found[2]

    def kill(self) -> None:
        """End it without any notice."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def usage(self) -> dict[str, int]:
        """Return what ``serve --usage`` tells about its directory."""
        told = json.loads(pipegrid("--json", "-d", str(self.directory), "serve", "--usage"))
        return {"bytes": told["all"]["bytes"], "quota": told["quota"], "left": told["left"]}


def write_static_servers(directory: Path, servers: Mapping[str, dict[str, object]]) -> None:
    """Write a ``servers.yaml`` with these announcements, by nickname."""
    storage = {
        f"v0-{base32.encode(name.encode().ljust(32))}": {"ann": {"nickname": name, **ann}}
        for name, ann in servers.items()
    }
    path = directory / SERVERS_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"storage": storage}))


class QuotaTests(SynchronousTestCase):
    """Four servers, one of which has a quota."""

    timeout = 240

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.root.mkdir(parents=True)
        self.random = Random(48)
        self.ports = [free_port() for _ in range(SERVERS)]
        self.servers = [self.launch(number, QUOTA) for number in range(SERVERS)]
        self.addresses = [server.addresses() for server in self.servers]

    def launch(self, number: int, quota: int = 0) -> QuotaServer:
        """Start a server; the first has a quota."""
        options = ("--quota", str(quota)) if number == 0 else ()
        server = QuotaServer(self.root / f"server{number}", self.ports[number], *options)
        self.addCleanup(server.stop)
        return server

    def restart(self, number: int, quota: int = 0) -> None:
        """Start a server again, which has ended."""
        self.servers[number] = self.launch(number, quota)
        self.assertEqual(self.servers[number].addresses(), self.addresses[number])

    @property
    def small(self) -> QuotaServer:
        """The one with the quota."""
        return self.servers[0]

    def announced(self, foolscap: bool) -> dict[str, dict[str, object]]:
        """Return the announcements of all servers, for clients of one protocol."""
        found = {}
        for server, (nurl, furl) in zip(self.servers, self.addresses, strict=True):
            ann: dict[str, object] = {"anonymous-storage-FURL": furl}
            if not foolscap:
                ann["anonymous-storage-NURLs"] = [nurl]
            found[server.directory.name] = ann
        return found

    def data(self, size: int = SIZE) -> bytes:
        return self.random.randbytes(size)

    def client(self, name: str, foolscap: bool) -> str:
        """Make a directory of this client; returns it."""
        directory = self.root / name
        directory.mkdir()
        (directory / "pipegrid.cfg").write_text(
            "[client]\nshares.needed = 2\nshares.happy = 3\nshares.total = 3\n"
            f"force_foolscap = {foolscap}\n"
        )
        write_static_servers(directory, self.announced(foolscap))
        for secret in ("convergence", "secret"):
            path = directory / "private" / secret
            path.write_text(base32.encode(self.random.randbytes(32)) + "\n")
        return str(directory)

    def gateway(self, name: str, foolscap: bool) -> Gateway:
        """Start a gateway of Tahoe-LAFS, which asks all servers for each file."""
        directory = self.root / name
        make_node(
            directory,
            f"[node]\nweb.port = tcp:{free_port()}:interface=127.0.0.1\n"
            "tub.port = disabled\ntub.location = disabled\n"
            f"[client]\nshares.needed = 2\nshares.happy = 3\nshares.total = {SERVERS}\n"
            f"force_foolscap = {foolscap}\n[storage]\nenabled = false\n",
        )
        write_static_servers(directory, self.announced(foolscap))
        gateway = Gateway(directory)
        self.addCleanup(gateway.stop)
        gateway.wait(SERVERS)
        return gateway

    def assert_full(self, quota: int) -> None:
        """The quota is used as far as whole shares allow, and not exceeded."""
        usage = self.small.usage()
        self.assertEqual(usage["quota"], quota)
        self.assertLessEqual(usage["bytes"], quota)
        self.assertLess(usage["left"], SHARE + 10_000)
        incoming = self.small.directory / "storage/shares/incoming"
        self.assertEqual(list(incoming.iterdir()), [])

    def test_this_client(self) -> None:
        """One command stores many files; all are whole, on three servers each, and can be read."""
        quota = QUOTA
        for foolscap in (False, True):
            client = self.client(f"client-{foolscap}", foolscap)
            names, contents = [], []
            for number in range(3 * FILES):
                path = self.root / f"file-{foolscap}-{number}"
                contents.append(self.data())
                path.write_bytes(contents[-1])
                names.append(str(path))
            caps = pipegrid("-d", client, "put", *names).decode().split()
            self.assert_full(quota)
            for cap, content in zip(caps, contents, strict=True):
                self.assertEqual(pipegrid("-d", client, "get", cap), content)
            pipegrid("-d", client, "check", "--verify", *caps)  # else its status is another
            self.assert_told(client, foolscap)
            self.small.stop()
            quota *= 2
            self.restart(0, quota)

    def assert_told(self, client: str, foolscap: bool) -> None:
        """Where the others do not suffice, one sentence says why, and nothing is stored in part."""
        self.servers[1].stop()
        before = self.small.usage()
        refused = run_pipegrid("-d", client, "put", "-", data=self.data())
        said = refused.stderr.decode()
        self.assertEqual(refused.returncode, 3, said)
        self.assertRegex(said, r"^pipegrid: cannot store .* reached only 2 of the 3 servers")
        if foolscap:
            self.assertRegex(said, r"server0 has space for \d+ bytes, but a share takes \d+")
        else:
            self.assertIn("server0 has no space: its quota is used up", said)
        self.assertEqual(said.count("\n"), 1)
        self.assertEqual(self.small.usage(), before)
        self.restart(1)

    def test_tahoe_lafs(self) -> None:
        """Its gateway stores one file after the other; all can be read, and mutable ones change."""
        quota = QUOTA
        for foolscap in (False, True):
            gateway = self.gateway(f"gateway-{foolscap}", foolscap)
            for number in range(FILES):
                content = self.data()
                cap = gateway.put(content)
                self.assertEqual(gateway.get(cap), content)
                good = gateway.check(cap)["results"]["count-shares-good"]
                self.assertGreaterEqual(good, SERVERS if number < 3 else SERVERS - 1)
            self.assert_full(quota)
            cap = gateway.put(self.data(1000), "?format=sdmf&mutable=true")
            content = self.data(3 * SIZE)
            gateway.request("PUT", f"uri/{cap}", content)
            self.assertEqual(gateway.get(cap), content)
            self.assert_full(quota)
            gateway.stop()
            self.small.stop()
            quota *= 2
            self.restart(0, quota)

    def test_a_killed_server(self) -> None:
        """After ``kill -9`` the number is what is on the disk, and what is removed by hand is found."""
        client = self.client("client", False)
        for number in range(2 * FILES):
            (self.root / f"file{number}").write_bytes(self.data())
        pipegrid("-d", client, "put", *(str(self.root / f"file{n}") for n in range(2 * FILES)))
        self.small.kill()
        shares = self.small.directory / "storage/shares"
        for share in sorted(shares.glob("[a-z2-7][a-z2-7]/*/[0-9]*"))[:2]:
            share.unlink()
        before = self.small.usage()
        self.assertGreater(before["left"], 2 * SHARE)
        self.restart(0, QUOTA)
        lines = pipegrid("--json", "-d", client, "status").splitlines()
        told = {each["nickname"]: each for each in map(json.loads, lines)}
        self.assertEqual(told["server0"]["available_bytes"], before["left"] - 84)

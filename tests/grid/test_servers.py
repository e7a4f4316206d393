"""servers.yaml: what it says, what is skipped, and a grid of the servers it names, over TLS."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.core import base32
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import UnhappyError, UsageError
from pipegrid.grid import Grid
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.grid.server_opening import (
    FLIGHT_BYTES,
    WINDOW_MEMORY_BYTES,
    ConnectionOptions,
    Windows,
    open_server,
)
from pipegrid.grid.servers_and_introducers_yaml import load_static_servers, parse_static_servers
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS, RefusedWay
from pipegrid.server.serve import ServeSettings, StorageNode
from pipegrid.transfer.peers import Peer
from pipegrid.transport.foolscap.client import FoolscapServer
from pipegrid.wire.announcements import KnownServer
from tests import vectors

reactor: Any = installed_reactor


def open_static(reactor: Any, servers: Sequence[KnownServer], shares: int) -> list[Peer]:
    """Return a peer for each server; files are spread over so many, which share the memory for windows."""
    windows = Windows.shared_by(max(1, min(len(servers), shares)))
    return [
        open_server(reactor, each, windows, ConnectionOptions(DIRECT_CONNECTIONS))
        for each in servers
    ]


RECORDED = vectors.load("gbs-http")
NURL = RECORDED["nurls"][0]
FURL = RECORDED["furl"]
SERVER_ID = "v0-" + base32.encode(b"k" * 32)


def parse(storage: Any) -> Any:
    """Return what a file with these entries says; YAML understands JSON."""
    return parse_static_servers(json.dumps({"storage": storage}).encode(), "servers.yaml")


def at(number: int) -> str:
    """Return the NURL of another server, at a later port; of 0 that one."""
    return re.sub(r"(?<=:)[0-9]+(?=/)", lambda port: str(int(port[0]) + number), NURL)


class ParseTests(SynchronousTestCase):
    """The format is Tahoe-LAFS's."""

    def test_a_full_entry(self) -> None:
        """Nickname, seed and tub id are those of the announcement."""
        announcement = {
            "nickname": "alice",
            "anonymous-storage-FURL": FURL,
            "anonymous-storage-NURLs": [NURL],
            "permutation-seed-base32": base32.encode(b"p" * 20),
        }
        entry = {"ann": announcement, "connections": {"tcp": "tcp"}}
        found = parse({SERVER_ID: entry})
        self.assertEqual(found.warnings, ())
        (server,) = found.servers
        self.assertEqual(server.identity.server_id, SERVER_ID)
        self.assertEqual(server.identity.nickname, "alice")
        self.assertEqual(server.identity.permutation_seed, b"p" * 20)
        self.assertEqual(base32.encode(server.identity.lease_seed), FURL[5:37])
        self.assertEqual(str(server.nurl), NURL)

    def test_a_short_entry(self) -> None:
        """A NURL is enough: everything else follows from it and the id."""
        (server,) = parse({SERVER_ID: {"ann": {"anonymous-storage-NURLs": [NURL]}}}).servers
        self.assertEqual(server.identity.nickname, SERVER_ID)
        self.assertEqual(server.identity.permutation_seed, b"k" * 32)
        self.assertEqual(len(server.identity.lease_seed), 20)

    def test_a_server_without_https(self) -> None:
        """Foolscap is spoken with a server that has a fURL and no NURL."""
        entry = {"ann": {"anonymous-storage-FURL": FURL}}
        found = parse({SERVER_ID: entry})
        self.assertEqual(found.warnings, ())
        (server,) = found.servers
        self.assertIsNone(server.nurl)
        self.assertEqual(str(server.furl), FURL)
        (peer,) = open_static(reactor, found.servers, 10)
        self.assertEqual(peer.protocol, "foolscap")
        self.assertIn(peer.address, FURL)

    def test_foolscap_can_be_forced(self) -> None:
        """A server that speaks both is then spoken to over Foolscap, and one that speaks only HTTPS never."""
        both = {"anonymous-storage-FURL": FURL, "anonymous-storage-NURLs": [NURL]}
        one = {"anonymous-storage-NURLs": [at(1)]}
        both_known, one_known = parse({"both": {"ann": both}, "one": {"ann": one}}).servers
        self.assertEqual(
            open_server(
                reactor,
                both_known,
                Windows(1 << 20, 1 << 20),
                ConnectionOptions(DIRECT_CONNECTIONS),
            ).protocol,
            "https",
        )
        peer = open_server(
            reactor,
            both_known,
            Windows(1 << 20, 1 << 20),
            ConnectionOptions(DIRECT_CONNECTIONS),
            force_foolscap=True,
        )
        self.assertEqual(peer.protocol, "foolscap")
        with self.assertRaises(ValueError) as caught:
            open_server(
                reactor,
                one_known,
                Windows(1 << 20, 1 << 20),
                ConnectionOptions(DIRECT_CONNECTIONS),
                force_foolscap=True,
            )
        self.assertIn("it speaks HTTPS only", str(caught.exception))

    def test_foolscap_beside_https(self) -> None:
        """Who speaks both has both ways, if that is asked for, and only then."""
        both = {"anonymous-storage-FURL": FURL, "anonymous-storage-NURLs": [NURL]}
        tor = FURL.replace("tcp:", "tor:").replace("127.0.0.1", "abc.onion")
        unreached = {"anonymous-storage-FURL": tor, "anonymous-storage-NURLs": [at(1)]}
        found = parse({"both": {"ann": both}, "unreached": {"ann": unreached}})
        ways = []
        for known in found.servers:
            server: Any = open_server(
                reactor,
                known,
                Windows(1 << 20, 1 << 20),
                ConnectionOptions(DIRECT_CONNECTIONS),
                foolscap_beside=True,
            ).server
            ways.append(getattr(server, "_current", server)._beside)
        self.assertEqual((len(ways), ways[1]), (2, None))
        server = open_server(
            reactor,
            found.servers[0],
            Windows(1 << 20, 1 << 20),
            ConnectionOptions(DIRECT_CONNECTIONS),
        ).server
        self.assertIsNone(server._current._beside)
        other = ways[0]._open_server()
        self.assertIsInstance(other, FoolscapServer)
        self.assertFalse(other._uploads._close_behind)
        self.assertEqual(other._link._connector._pin, found.servers[0].nurl.spki_hash)

    def test_the_choice_of_addresses(self) -> None:
        """With direct connections those of TCP are taken, if there are any; else onion services."""
        tor = NURL.replace("pb:", "pb+tor:").replace("127.0.0.1", "abc.onion")
        tub, _, secret = FURL.partition("@")
        onion = f"{tub}@tor:abc.onion:1/x"
        both = f"{tub}@tor:abc.onion:1,{secret}"
        through = DIRECT_CONNECTIONS._replace(tcp=DIRECT_CONNECTIONS.tor)
        disabled = DIRECT_CONNECTIONS._replace(tcp=RefusedWay("no TCP"))
        no_tor = DIRECT_CONNECTIONS._replace(tor=RefusedWay("no Tor"))
        home, away = ("https", "127.0.0.1"), ("https", "abc.onion")
        for nurls, furl, policy, expected in (
            ([tor, NURL], None, DIRECT_CONNECTIONS, home),
            ([tor, NURL], None, no_tor, home),
            ([tor, NURL], None, through, away),
            ([tor, NURL], None, disabled, away),
            ([NURL], None, through, home),
            ([tor], None, DIRECT_CONNECTIONS, away),
            ([tor], FURL, DIRECT_CONNECTIONS, ("foolscap", "127.0.0.1")),
            ([tor], FURL, through, away),
            ([tor], onion, DIRECT_CONNECTIONS, away),
            ([], onion, DIRECT_CONNECTIONS, ("foolscap", "abc.onion")),
            (
                [],
                both,
                disabled,
                ("foolscap", "abc.onion"),
            ),
            ([NURL], onion, disabled, ("foolscap", "abc.onion")),
            ([tor], None, no_tor, "no Tor"),
            ([NURL], FURL, disabled, "no TCP"),
            ([], onion, no_tor, "no Tor"),
        ):
            ann: dict[str, Any] = {"anonymous-storage-NURLs": nurls} if nurls else {}
            ann |= {"anonymous-storage-FURL": furl} if furl else {}
            (known,) = parse({"x": {"ann": ann}}).servers
            windows = Windows(1 << 20, 1 << 20)
            if isinstance(expected, str):
                with self.assertRaises(ValueError) as caught:
                    open_server(reactor, known, windows, ConnectionOptions(policy))
                self.assertIn(
                    f"no connection to it is permitted: {expected}", str(caught.exception)
                )
                continue
            peer = open_server(reactor, known, windows, ConnectionOptions(policy))
            found = (peer.protocol, peer.address.rpartition(":")[0])
            self.assertEqual(found, expected, (nurls, furl))
            direct = policy in (DIRECT_CONNECTIONS, no_tor) and "onion" not in found[1]
            self.assertEqual(peer.connects_slowly, not direct)

    def test_bad_entries_are_skipped(self) -> None:
        """Each is named with its reason, and the others are there."""
        good = {"ann": {"anonymous-storage-NURLs": [NURL]}}
        bad: list[Any] = [
            None,
            7,
            {},
            {"ann": []},
            {"ann": {}},
            {"ann": {"anonymous-storage-FURL": NURL}},
            {"ann": {"anonymous-storage-NURLs": [FURL]}},
            {"ann": {"anonymous-storage-FURL": f"pb://{FURL[5:37]}@i2p:abc.i2p/x"}},
            {"ann": {"anonymous-storage-NURLs": NURL}},
            {"ann": {"anonymous-storage-NURLs": [7]}},
            {"ann": {"anonymous-storage-NURLs": ["pb://nonsense"]}},
            {"ann": {"anonymous-storage-NURLs": [NURL], "nickname": 7}},
            {"ann": {"anonymous-storage-NURLs": [NURL], "anonymous-storage-FURL": "x"}},
            {"ann": {"anonymous-storage-NURLs": [NURL], "permutation-seed-base32": "1"}},
        ]
        entries = {f"bad{n}": entry for n, entry in enumerate(bad)} | {"good": good, "": good}
        found = parse(entries)
        self.assertEqual([each.identity.server_id for each in found.servers], ["good"])
        self.assertEqual(len(found.warnings), len(bad) + 1)
        for n, warning in enumerate(found.warnings[:-1]):
            self.assertIn(f"'bad{n}' is skipped: ", warning)
            self.assertNotIn(NURL.rpartition("/")[2][:32], warning)  # the secret

    def test_one_server_under_two_names(self) -> None:
        """Counts once: what is on both would be on one disk, and an upload be called happy for it."""
        https, foolscap = {"anonymous-storage-NURLs": [NURL]}, {"anonymous-storage-FURL": FURL}
        for first, second in (
            (https, https),
            (foolscap, foolscap),
            (https, https | foolscap),
            (https | foolscap, foolscap),
        ):
            entries = {"a": {"ann": first}, "b": {"ann": second}}
            found = parse(entries | {"c": {"ann": {"anonymous-storage-NURLs": [at(1)]}}})
            self.assertEqual([each.identity.server_id for each in found.servers], ["a", "c"])
            (warning,) = found.warnings
            self.assertIn("'b' is skipped: it has the address of server 'a'", warning)
            self.assertNotIn(NURL.rpartition("/")[2][:32], warning)  # the secret

    def test_two_servers_under_one_name(self) -> None:
        """YAML takes the later one and says nothing; whoever copied an entry is told that one is missing."""
        lines = [b"storage:"]
        for number, name in enumerate((b"a", b"b", b"a")):
            address = at(number).encode()
            lines += [b"  " + name + b":", b"    ann: {anonymous-storage-NURLs: ['%s']}" % address]
        found = parse_static_servers(b"\n".join(lines), "servers.yaml")
        self.assertEqual([str(each.nurl) for each in found.servers], [at(2), at(1)])
        (warning,) = found.warnings
        self.assertTrue(warning.startswith("servers.yaml:6: server 'a' is listed twice"), warning)
        odd = b"storage: ann\n? [ann, 1]\n: x\nstorage: {[1]: {ann: 1}, [1]: {ann: 1}}"
        self.assertRaises(UsageError, parse_static_servers, odd, "x")
        odd = b"storage: 'ann: ann:'\nstorage: {7: {ann: 1}, 7: {ann: 1}}"
        self.assertIn(
            "x:2: server '7' is listed twice", parse_static_servers(odd, "x").warnings[-1]
        )

    def test_files_that_are_none(self) -> None:
        """Nothing, or no servers, is no error; what is no such file at all is."""
        for text in (b"", b"storage:\n", b"{}"):
            if text != b"storage:\n":
                self.assertEqual(parse_static_servers(text, "x").servers, ())
        for text in (
            b"storage: [1]\n",
            b"other: 1\n",
            b"- a\n",
            b"\xff\xfe\xfd",
            b"{",
            b"a: !!python/object:x.y {}",
        ):
            with self.assertRaises(UsageError) as caught:
                parse_static_servers(text, "some/servers.yaml")
            self.assertIn("some/servers.yaml", str(caught.exception))
        self.assertEqual(load_static_servers(Path(self.mktemp())).servers, ())

    def test_windows_share_the_memory(self) -> None:
        """Whatever the number of servers, windows and the message beyond each stay within the budget."""
        for servers in range(1, 26):
            windows = Windows.shared_by(servers)
            self.assertLessEqual(servers * windows.held_bytes * 9 // 8, WINDOW_MEMORY_BYTES)
            self.assertLessEqual(servers * windows.flight_bytes * 9 // 8, FLIGHT_BYTES)
        self.assertGreaterEqual(Windows.shared_by(256).held_bytes, 256 << 10)
        found = parse({f"s{n}": {"ann": {"anonymous-storage-NURLs": [at(n)]}} for n in range(12)})
        peers = open_static(reactor, found.servers, 10)
        self.assertEqual([peer.name for peer in peers], [f"s{n}" for n in range(12)])
        self.assertEqual((peers[0].protocol, peers[0].address), ("https", "127.0.0.1:39472"))


class GridTests(TestCase):
    """A grid of real servers on the loopback interface, over TLS."""

    timeout = 60

    def setUp(self) -> Deferred[None]:  # type: ignore[override]
        return Deferred.fromCoroutine(self._set_up())

    async def _set_up(self) -> None:
        self.directory = Path(self.mktemp())
        self.nodes = [
            StorageNode(
                reactor,
                ServeSettings(
                    directory=self.directory / f"node{n}",
                    port="tcp:0:interface=127.0.0.1",
                    durability="none",
                ),
            )
            for n in range(4)
        ]
        await gatherResults([node.start() for node in self.nodes])
        self.client = self.directory / "client"
        self.write_servers([node.nurl for node in self.nodes])
        create_client(self.client, params=Params(2, 4), happy=3)

    def tearDown(self) -> Deferred[Any]:  # type: ignore[override]
        return gatherResults([node.stop() for node in self.nodes])

    def write_servers(self, nurls: list[str], **more: Any) -> None:
        """Write the client's file."""
        (self.client / "private").mkdir(parents=True, exist_ok=True)
        entries = {
            f"node{n}": {"ann": {"anonymous-storage-NURLs": [text], **more}}
            for n, text in enumerate(nurls)
        }
        (self.client / SERVERS_NAME).write_text(json.dumps({"storage": entries}))

    def test_put_and_get(self) -> Deferred[None]:
        """Files of many sizes go there and come back; status tells who is there."""
        return Deferred.fromCoroutine(self._test_put_and_get())

    async def _test_put_and_get(self) -> None:
        random = Random(1)
        grid: Grid = await Grid.open(reactor, self.client)
        files = [random.randbytes(size) for size in (100, 70_000, 1_500_000, 5_000_000)]
        results = await gatherResults([grid.put(data) for data in files])
        await grid.close()
        grid = await Grid.open(reactor, self.client)
        for data, result in zip(files, results, strict=True):
            self.assertEqual(len(result.shares_placed), 4)
            into = BytesIO()
            await grid.get(result.cap, into)
            self.assertEqual(into.getvalue(), data)
            checked = await grid.check(result.cap, verify=len(data) < 100_000)
            self.assertTrue(checked.healthy)
        for status in await grid.status():
            self.assertTrue(status.reachable, status.reason)
            self.assertEqual(status.protocol, "https")
        await grid.close()

    def test_bundles_from_the_first_share_on(self) -> Deferred[None]:
        """Where the file says that servers take bundles, nothing has to be learned first."""
        return Deferred.fromCoroutine(self._test_bundles())

    async def _test_bundles(self) -> None:
        files = [Random(n).randbytes(200) for n in range(20)]
        for more, operations in (
            ({}, {"allocate", "write"}),
            ({"pipegrid-bundles": 9999}, {"bundle"}),
        ):
            self.write_servers([node.nurl for node in self.nodes], **more)
            services = [node._server.service for node in self.nodes if node._server is not None]
            for service in services:
                service.requests.clear()
            grid: Grid = await Grid.open(reactor, self.client)
            results = await gatherResults([grid.put(data) for data in files])
            for data, result in zip(files, results, strict=True):
                self.assertEqual(await grid.read(result.cap), data)
            await grid.close()
            made = {name for service in services for name, _ in service.requests}
            self.assertEqual(made - {"list", "read"}, operations)
            files = [data + b"other" for data in files]

    def test_a_server_with_another_key(self) -> Deferred[None]:
        """A server that does not own the key of its address is told nothing, and named."""
        return Deferred.fromCoroutine(self._test_another_key())

    async def _test_another_key(self) -> None:
        nurls = [node.nurl for node in self.nodes]
        ports = [text.partition("@")[2] for text in nurls]
        # Each address has the key of the next server.
        self.write_servers(
            [text.partition("@")[0] + "@" + ports[(n + 1) % 4] for n, text in enumerate(nurls)]
        )
        grid: Grid = await Grid.open(reactor, self.client)
        for status in await grid.status():
            self.assertFalse(status.reachable)
            self.assertIn("is not the server it should be", status.reason or "")
        with self.assertRaises(UnhappyError):
            await grid.put(b"x" * 1000)
        for node in self.nodes:
            assert node._server is not None
            self.assertEqual(sum(node._server.service.requests.values()), 0)
        await grid.close()

    def test_no_servers(self) -> Deferred[None]:
        """A directory whose servers are all unusable says so, with a reason."""
        return Deferred.fromCoroutine(self._test_no_servers())

    async def _test_no_servers(self) -> None:
        self.write_servers(["pb://nonsense"])
        with self.assertRaises(UsageError) as caught:
            await Grid.open(reactor, self.client)
        self.assertIn("is skipped", str(caught.exception))

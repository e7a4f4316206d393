"""``pipegrid serve``: options in, a NURL out, status 0 when told to end."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from threading import Event
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.cli.cmd_serve import introducers_of
from pipegrid.cli.command_grammar import start
from pipegrid.cli.console import Console
from pipegrid.disk.directory_claim import process_began
from pipegrid.errors import UsageError
from pipegrid.grid import serve_settings
from pipegrid.grid.serve_settings import ServerDirectory
from pipegrid.reactor.connection_policy import ProxyAddress
from pipegrid.server import identity, storage_clients
from pipegrid.server.onion_service import OnionSettings
from pipegrid.storage.share_store import ShareStore
from pipegrid.wire import server_address
from pipegrid.wire.storage_messages import ShareChange, SlotSecrets
from tests.server.test_onion_service import FakeTor
from tests.storage.support import SECRETS, SI

LOOPBACK = "tcp:0:interface=127.0.0.1"


class ServeTests(TestCase):
    """The command, on the real reactor."""

    timeout = 30

    def setUp(self) -> None:
        self.out = io.BytesIO()
        self.err = io.StringIO()
        self.directory = self.mktemp()

    def serve(self, *arguments: str) -> Deferred[int]:
        """Start the command."""
        console = Console(None, self.out, self.err)
        return start(["-d", self.directory, *arguments], console, reactor)

    async def until_output(self) -> None:
        """Wait for the first result."""
        while not self.out.getvalue():
            await deferLater(reactor, 0.005)

    def test_until_told_to_end(self) -> Deferred[None]:
        """It prints its NURL, logs in both forms, and ends with 0 when cancelled."""
        return Deferred.fromCoroutine(self._test_until_told())

    async def _test_until_told(self) -> None:
        log = Path(self.mktemp())
        arguments = ["--port", LOOPBACK, "--location", "example.org:80", "--reserved-space", "1G"]
        serving = self.serve("--json", "serve", *arguments, "--log", str(log))
        await self.until_output()
        result = json.loads(self.out.getvalue())
        address = server_address.parse_nurl(result["nurl"])
        self.assertEqual((address.host, address.port), ("example.org", 80))
        furl = result["furl"]
        self.assertTrue(furl.endswith(f"@tcp:example.org:80/{address.swissnum}"), furl)
        self.assertEqual(result["storage"], f"{self.directory}/storage")
        serving.cancel()
        self.assertEqual(await serving, 0)
        self.assertIn("stopped serving", self.err.getvalue())
        formats = [json.loads(line)["log_format"] for line in log.read_text().splitlines()]
        self.assertIn("stopped serving {storage}", formats)
        self.assertNotIn(address.swissnum, log.read_text() + self.err.getvalue())

    def test_an_onion_service(self) -> Deferred[None]:
        """``--tor``: the onion service is the only address; options that would reveal another are refused."""
        return Deferred.fromCoroutine(self._test_an_onion_service())

    async def _test_an_onion_service(self) -> None:
        tor = FakeTor()
        loop: Any = reactor
        listening = loop.listenTCP(0, tor, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        control = f"tcp:127.0.0.1:{listening.getHost().port}"
        serving = self.serve("--json", "serve", "--tor", "--tor-control-port", control)
        await self.until_output()
        result = json.loads(self.out.getvalue())
        self.assertEqual(len(result["nurls"]), 1)
        self.assertRegex(result["nurl"], r"pb\+tor://.*@a{56}\.onion:3457/")
        self.assertRegex(result["furl"], r"@tor:a{56}\.onion:3457/")
        self.assertRegex(tor.asked[0], r"^ADD_ONION NEW:ED25519-V3 Port=3457,127\.0\.0\.1:[0-9]+$")
        serving.cancel()
        self.assertEqual(await serving, 0)
        while tor.connections:
            await deferLater(reactor, 0.005)
        for options, words in (
            (["--tor", "--location", "a.b:1"], "leave --location out"),
            (["--tor", "--port", "8098"], "is open to others"),
            (["--tor", "--join", "1-a-b"], "cannot be given together"),
            (["--tor-control-port", control], "give --tor, too"),
            (["--tor", "--tor-control-port", "tor.example:9051"], "must be an address"),
            (["--tor", "--tor-control-port", "tcp:127.0.0.1:1"], "is Tor running"),
        ):
            status = await self.serve("serve", *options)
            self.assertEqual(status, 2, (options, self.err.getvalue()))
            self.assertIn(words, self.err.getvalue())
        self.assertEqual(len(tor.asked), 1)
        config = Path(self.directory) / "pipegrid.cfg"
        socks = "[connections]\ntcp = socks\n[socks]\nport = 127.0.0.1:1\n"
        config.write_text(f"[client]\n{socks}[tor]\nenabled = false\n")
        self.assertEqual(await self.serve("serve", "--tor", "--tor-control-port", control), 2)
        self.assertIn("[tor] enabled is false", self.err.getvalue())
        # The code is not spent for a server that would not start.
        config.write_text("[client]\n[node]\nreveal-IP-address = false\n[connections]\ntcp = tor\n")
        relay = ["--relay-url", "ws://127.0.0.1:1/v1", "--location", "a.b:1"]
        joining = self.serve("serve", "--no-tor", "--join", "7-a-b", *relay)
        self.assertEqual(await joining, 2, self.err.getvalue()[-300:])
        self.assertIn("the location for clients must not contain 'a.b:1'", self.err.getvalue())

    async def served(self, *options: str) -> dict[str, Any]:
        """Start a server, stop it, and return what it printed; ``said`` has what it said meanwhile."""
        self.out.seek(0)
        self.out.truncate()
        before = len(self.err.getvalue())
        serving = self.serve("--json", "serve", *options)
        while not self.out.getvalue() and not serving.called:
            await deferLater(reactor, 0.005)
        serving.cancel()
        status = await serving
        self.said = self.err.getvalue()[before:]
        self.assertEqual(status, 0, self.said)
        found: dict[str, Any] = json.loads(self.out.getvalue())
        return found

    async def refused(self, *options: str) -> str:
        """Return why a server does not start."""
        before = len(self.err.getvalue())
        self.assertEqual(await self.serve("serve", *options), 2, self.err.getvalue()[before:])
        return self.err.getvalue()[before:]

    def test_a_later_start_does_the_same(self) -> Deferred[None]:
        """What was given before holds until something else is given, and is named, without secrets."""
        return Deferred.fromCoroutine(self._test_a_later_start())

    async def _test_a_later_start(self) -> None:
        furl = "pb://hij2vaxfy3gompizcqnolgf7oegbnsfr@tcp:127.0.0.1:9/swissnum"
        first = await self.served(
            *("--port", LOOPBACK, "--quota", "3GB", "--introducer", furl, "--nickname", "n"),
            *("--storage", f"{self.directory}/shares here"),
        )
        self.assertNotIn("as at the last start", self.said)
        again = await self.served()
        first["storage"] = str(Path(first["storage"]).absolute())
        self.assertEqual(again, first)
        port = server_address.parse_nurl(first["nurl"]).port
        self.assertIn(
            f"as at the last start: --port tcp:{port}:interface=127.0.0.1, --storage "
            f"{Path(self.directory).absolute()}/shares here, --quota 3 GB, --nickname n, --introducer "
            f"pb://hij2vaxfy3gompizcqnolgf7oegbnsfr@tcp:127.0.0.1:9 ({self.directory}/private/serve.json)",
            self.said,
        )
        self.assertNotIn("swissnum", self.said)
        path = Path(self.directory) / "private/serve.json"
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        await self.served("--quota", "4GB", "--introducer", "none")
        self.assertIn("the last start had --quota 3 GB, --introducer pb://", self.said)
        self.out.truncate(0)
        self.assertEqual(await self.serve("serve", "--usage"), 0)
        self.assertIn("of 4 GB", self.out.getvalue().decode())
        # A start that fails changes nothing.
        await self.refused("--port", "nonsense:1")
        self.assertEqual(json.loads(path.read_text())["introducers"], ["none"])
        self.assertEqual((await self.served())["nurl"], first["nurl"])
        path.write_text('{"port": 3}')
        self.assertIn("cannot understand", await self.refused())

    def test_settings_go_before_an_earlier_start(self) -> Deferred[None]:
        """What a file says is followed; another option holds for one start, and a sentence says so."""
        return Deferred.fromCoroutine(self._test_settings_first())

    async def _test_settings_first(self) -> None:
        await self.served("--port", LOOPBACK, "--quota", "3GB")
        (Path(self.directory) / "pipegrid.cfg").write_text("[client]\n[storage]\nquota = 5GB\n")
        await self.served()  # what joining a grid writes ends what was given before, too
        self.assertIn("no longer as at the last start, since the settings in", self.said)
        self.assertIn("say otherwise: --quota 3 GB\n", self.said)
        await self.served()
        self.assertNotIn("--quota", self.said)
        await self.served("--quota", "4GB")
        self.assertIn("for this start alone, since the settings in", self.said)
        self.assertIn("say otherwise: --quota 4 GB", self.said)
        self.out.truncate(0)
        self.assertEqual(await self.serve("serve", "--usage"), 0)
        self.assertIn("of 5 GB", self.out.getvalue().decode())

    def test_a_directory_that_is_moved(self) -> Deferred[None]:
        """A storage directory in it goes with it."""
        return Deferred.fromCoroutine(self._test_moved())

    async def _test_moved(self) -> None:
        await self.served("--port", LOOPBACK, "--storage", f"{self.directory}/shares")
        moved = self.mktemp()
        os.rename(self.directory, moved)
        self.directory = moved
        self.assertEqual((await self.served())["storage"], f"{Path(moved).absolute()}/shares")
        (Path(moved) / "private/serve.json").write_text('{"quota_bytes": -1}')
        self.assertIn("cannot understand", await self.refused())

    def test_a_port_that_clients_do_not_know(self) -> Deferred[None]:
        """It is reported where the location has another."""
        return Deferred.fromCoroutine(self._test_a_port())

    async def _test_a_port(self) -> None:
        await self.served("--port", LOOPBACK, "--location", "example.org:80")
        self.assertNotIn("another port", self.said)
        await self.served()
        self.assertNotIn("another port", self.said)
        await self.served("--port", LOOPBACK)
        self.assertIn("clients are sent to example.org:80, another port", self.said)

    def test_an_onion_service_stays_one(self) -> Deferred[None]:
        """A later start never serves openly what was hidden, unless it is told to."""
        return Deferred.fromCoroutine(self._test_it_stays_one())

    async def _test_it_stays_one(self) -> None:
        tor = FakeTor()
        loop: Any = reactor
        listening = loop.listenTCP(0, tor, interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        control = f"tcp:127.0.0.1:{listening.getHost().port}"
        hidden = await self.served("--tor", "--tor-control-port", control)
        self.assertEqual((await self.served())["nurls"], hidden["nurls"])
        self.assertIn(f"as at the last start: --tor, --tor-control-port {control}", self.said)
        record = Path(self.directory) / "private/serve.json"
        known = record.read_text()
        record.unlink()
        self.assertIn("was an onion service, since it has private/", await self.refused())
        record.write_text(known)
        # A control port that the settings name later is followed.
        config = Path(self.directory) / "pipegrid.cfg"
        config.write_text("[client]\n[tor]\ncontrol.port = tcp:127.0.0.1:1\n")
        self.assertIn("Tor's control port at 127.0.0.1:1 cannot be used", await self.refused())
        # As an invitation leaves it: a client's, too.
        (Path(self.directory) / "pipegrid.cfg").write_text("[client]\n")
        openly = await self.served("--no-tor", "--port", LOOPBACK)
        self.assertIn("@127.0.0.1:", openly["nurl"])
        self.assertEqual((await self.served())["nurls"], openly["nurls"])
        while tor.connections:
            await deferLater(reactor, 0.005)

    def test_a_storage_directory_that_is_lost(self) -> Deferred[None]:
        """Such as one on a disk that is not mounted: only the first start makes it."""
        return Deferred.fromCoroutine(self._test_a_lost_storage())

    async def _test_a_lost_storage(self) -> None:
        storage = Path(self.directory).absolute() / "disk"
        await self.served("--port", LOOPBACK, "--storage", str(storage))
        (storage / "serve.lock").unlink()
        for path in sorted(storage.rglob("*"), reverse=True):
            path.rmdir()
        self.assertIn(f"{storage} is empty, and this server has run before", await self.refused())
        storage.rmdir()
        self.assertIn(f"{storage} does not exist, and this server has run", await self.refused())
        self.assertFalse(storage.exists())
        (storage / "shares").mkdir(parents=True)  # as it says
        await self.served()

    def test_two_servers_with_one_key(self) -> Deferred[None]:
        """The second is refused, also with shares of its own."""
        return Deferred.fromCoroutine(self._test_two_servers())

    async def _test_two_servers(self) -> None:
        await self.served("--port", LOOPBACK)
        self.out.truncate(0)
        serving = self.serve("serve")
        await self.until_output()
        other = Path(self.mktemp()) / "shares"
        other.mkdir(parents=True)
        said = await self.refused("--storage", str(other.parent), "--port", LOOPBACK)
        self.assertIn("another server runs in", said)
        serving.cancel()
        self.assertEqual(await serving, 0)

    def test_all_addresses(self) -> Deferred[None]:
        """A server in several places prints a NURL for each, and one fURL with all of them."""
        return Deferred.fromCoroutine(self._test_all_addresses())

    async def _test_all_addresses(self) -> None:
        places = "--location", "10.0.0.7:80,example.org:8098"
        serving = self.serve("serve", "--port", LOOPBACK, *places)
        await self.until_output()
        first, second, furl = self.out.getvalue().decode().splitlines()
        serving.cancel()
        self.assertEqual(await serving, 0)
        self.assertIn("@10.0.0.7:80/", first)
        self.assertIn("@example.org:8098/", second)
        self.assertIn("@tcp:10.0.0.7:80,tcp:example.org:8098/", furl)

    def test_unfinished_uploads_go_on(self) -> Deferred[None]:
        """
        What was cut off is there for as long as one says: the next server goes on with it, and says so, and
        one that keeps it for less gives it up when it starts.
        """
        return Deferred.fromCoroutine(self._test_unfinished())

    async def _test_unfinished(self) -> None:
        storage = Path(self.directory) / "storage"
        store = ShareStore(storage, clock=time.time)
        store.allocate(SI, {0}, 100, SECRETS)
        store.upload(SI, 0, SECRETS.upload).write(0, [b"x" * 50])
        store.close()
        (unfinished,) = storage.glob("shares/incoming/*.0")
        three_days_ago = time.time() - 3 * 86400
        os.utime(unfinished, (three_days_ago, three_days_ago))
        for kept, stays in (("7 days", True), ("", True), ("2d", False)):
            self.out.truncate(0)
            self.err.truncate(0)
            options = ["--keep-unfinished", kept] if kept else []
            serving = self.serve("serve", "--port", LOOPBACK, *options)
            await self.until_output()
            for _ in range(1000):
                if unfinished.exists() == stays:
                    break
                await deferLater(reactor, 0.005)
            self.assertEqual(unfinished.exists(), stays, kept)
            serving.cancel()
            self.assertEqual(await serving, 0)
            self.assertIn("1 unfinished uploads can be resumed", self.err.getvalue())
        self.assertFalse(any(storage.glob("shares/incoming/*")))

    def test_usage(self) -> Deferred[None]:
        """It shows what shares take, and what the quota leaves, also while a server runs."""
        return Deferred.fromCoroutine(self._test_usage())

    async def _usage(self, *options: str, status: int = 0) -> str:
        self.out.truncate(0)
        self.out.seek(0)
        self.assertEqual(await self.serve(*options, "serve", "--usage"), status)
        return self.out.getvalue().decode()

    async def _test_usage(self) -> None:
        self.assertEqual(await self._usage(status=2), "")
        self.assertIn(
            f"there is no storage directory {self.directory}/storage", self.err.getvalue()
        )
        store = ShareStore(Path(self.directory) / "storage", clock=time.time)
        store.allocate(SI, {0, 1}, 10_000, SECRETS)
        for number in (0, 1):
            store.upload(SI, number, SECRETS.upload).write(0, [b"x" * 10_000])
        store.upload(SI, 0, SECRETS.upload).publish()
        change = ShareChange((), ((0, b"y" * 528),), None)
        slot = SlotSecrets(SECRETS.lease, b"w" * 32)
        store.slots.testv_and_readv_and_writev(bytes(16), slot, {0: change}, ())
        store.close()
        self.assertEqual(
            await self._usage(),
            "immutable   1  share   10.1 kB\nmutable     1  share   1 kB\n"
            "unfinished  1  share   10.1 kB\nall         3  shares  21.2 kB\n",
        )
        self.out.truncate(0)
        serving = self.serve("serve", "--port", LOOPBACK, "--quota", "25kB")
        await self.until_output()
        self.assertIn(
            "all         3  shares  21.2 kB of 25 kB, 3.83 kB left\n", await self._usage()
        )
        told = json.loads(await self._usage("--json"))
        self.assertEqual(told["immutable"], {"shares": 1, "bytes": 10_084})
        self.assertEqual(told["all"], {"shares": 3, "bytes": 21_168})
        self.assertEqual((told["quota"], told["left"]), (25_000, 3832))
        serving.cancel()
        self.assertEqual(await serving, 0, self.err.getvalue())

    def test_named_clients(self) -> Deferred[None]:
        """``--client`` prints a client's addresses, and ``--usage`` what its shares take."""
        return Deferred.fromCoroutine(self._test_named_clients())

    async def _said(self, *options: str, status: int = 0) -> str:
        self.out.truncate(0)
        self.out.seek(0)
        self.assertEqual(await self.serve(*options), status, self.err.getvalue())
        return self.out.getvalue().decode()

    async def _test_named_clients(self) -> None:
        self.assertEqual(await self._said("serve", "--client", "alice", status=2), "")
        self.assertIn(f"there is no server in {self.directory} yet", self.err.getvalue())
        serving = self.serve("serve", "--port", LOOPBACK)
        await self.until_output()
        own = self.out.getvalue().decode().split()
        alice = await self._said("serve", "--client", "alice", "--client-quota", "1MB")
        self.assertEqual(
            [each.rpartition("/")[0] for each in alice.split()],
            [each.rpartition("/")[0] for each in own],
        )
        self.assertEqual(await self._said("serve", "--client", "alice"), alice)
        bob = await self._said("serve", "--client", "bob")
        self.assertEqual(len({*own, *alice.split(), *bob.split()}), 6)
        self.assertIn("the quota of alice: 1 MB\n", self.err.getvalue())
        self.assertIn("the quota of bob: none\n", self.err.getvalue())
        (client, _) = storage_clients.read_clients(Path(self.directory))
        lease = SECRETS.lease._replace(owner=client.number)
        store = ShareStore(Path(self.directory) / "storage", clock=time.time)
        store.clients.set_clients([client.quota])
        store.count_usage()
        store.allocate(SI, {0}, 10_000, SECRETS._replace(lease=lease))
        share = store.upload(SI, 0, SECRETS.upload)
        share.write(0, [b"x" * 10_000])
        share.publish()
        store.close()
        self.assertIn(
            "client alice  1  share   10.1 kB of 1 MB, 990 kB left\nclient bob    0  shares  0 B\n",
            await self._usage(),
        )
        told = json.loads(await self._usage("--json"))["clients"]
        self.assertEqual(
            told["alice"], {"shares": 1, "bytes": 10_084, "quota": 1_000_000, "left": 989_916}
        )
        said = await self._said("serve", "--remove-client", "alice")
        self.assertEqual(said, "removed the client alice\n")
        self.assertNotIn("alice", await self._usage())
        for options in (
            ("--remove-client", "alice"),
            ("--client-quota", "1MB"),
            ("--client", "a", "--remove-client", "b"),
            ("--client", "../a"),
        ):
            await self._said("serve", *options, status=2)
        serving.cancel()
        self.assertEqual(await serving, 0, self.err.getvalue())

    def test_told_to_end_while_it_counts(self) -> Deferred[None]:
        """A start that counts shares for its quota waits a little; told to end meanwhile, it ends with 0."""
        return Deferred.fromCoroutine(self._test_counting())

    async def _test_counting(self) -> None:
        begun, ended = Event(), Event()

        def count(store: ShareStore) -> int:
            begun.set()
            ended.wait(20)
            return 0

        self.patch(ShareStore, "count_usage", count)
        serving = self.serve("serve", "--port", LOOPBACK, "--quota", "25kB")
        while not begun.is_set():
            await deferLater(reactor, 0.005)
        self.assertEqual(self.out.getvalue(), b"")
        serving.cancel()
        ended.set()
        self.assertEqual(await serving, 0, self.err.getvalue())

    def test_refusals(self) -> Deferred[None]:
        """What cannot be served is a sentence and status 2."""
        return Deferred.fromCoroutine(self._test_refusals())

    def test_a_tahoe_nodes_directory(self) -> Deferred[None]:
        """What its ``tahoe.cfg`` says is done, a running node is refused, and only a lock is written."""
        return Deferred.fromCoroutine(self._test_tahoe())

    async def _test_tahoe(self) -> None:
        node = Path(self.directory)
        (node / "private").mkdir(parents=True)
        pem = identity.make_pem()
        (node / "private/node.pem").write_bytes(pem)
        known = identity.from_pem(pem, "swissnum", "node.pem").furl(["tcp:example.org:80"])
        (node / "private/storage.furl").write_text(f"{known}\n")
        (node / "tahoe.cfg").write_text(
            f"[node]\ntub.port = {LOOPBACK},{LOOPBACK}\ntub.location = tcp:example.org:80\n"
            "[storage]\nstorage_dir = shares-here\nplugins = x\n"
        )
        (node / "running.process").write_text(f"{os.getpid()} {process_began(os.getpid())}")
        self.assertEqual(await self.serve("serve"), 2)
        self.assertIn("still running", self.err.getvalue())
        (node / "running.process").unlink()
        self.assertIn("shares-here does not exist, and this server has", await self.refused())
        (node / "shares-here/shares").mkdir(parents=True)
        before = {path: path.read_bytes() for path in node.rglob("*") if path.is_file()}
        serving = self.serve("--json", "serve")
        await self.until_output()
        result = json.loads(self.out.getvalue())
        self.assertEqual(result["furl"], str(known))
        self.assertEqual(result["storage"], str(node / "shares-here"))
        self.assertIn("plugins are not served", self.err.getvalue())
        serving.cancel()
        self.assertEqual(await serving, 0)
        after = {path: path.read_bytes() for path in node.rglob("*") if path.is_file()}
        self.assertEqual(after, before | {node / "shares-here/serve.lock": b""})
        page = (Path(__file__).parents[2] / "docs/how-to-replace-a-node.md").read_text("utf-8")
        written = page.partition("## What is written there")[2].partition("## ")[0]
        self.assertIn("`storage/serve.lock`", written)

    async def _test_refusals(self) -> None:
        for arguments in (
            ["--port", "nonsense:1"],
            ["--port", LOOPBACK, "--log", "/nowhere/x"],
            ["--port", LOOPBACK, "--location", "x"],
            ["--port", LOOPBACK, "--durability", "perhaps"],
            ["--port", LOOPBACK, "--keep-unfinished", "forever"],
            ["--port", LOOPBACK, "--keep-unfinished", "59s"],
        ):
            self.assertEqual(await self.serve("serve", *arguments), 2, arguments)
        self.assertEqual(self.out.getvalue(), b"")
        self.assertNotIn("stopped serving", self.err.getvalue(), "it never began")
        self.assertNotIn("Traceback", self.err.getvalue())


class TahoeDirectoryTests(SynchronousTestCase):
    """Whom a server is announced to."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.furl = "pb://hij2vaxfy3gompizcqnolgf7oegbnsfr@tcp:example.org:1/introducer"
        self.theirs = ServerDirectory(
            {}, {"grid": server_address.parse_furl(self.furl)}, is_tahoe=True
        )
        self.ours = ServerDirectory(
            {}, {"grid": server_address.parse_furl(self.furl)}, is_tahoe=False
        )

    def test_options_of_an_onion_service(self) -> None:
        """They go before what the directory says; its key and its port stay."""
        theirs = OnionSettings(Path("key"), (ProxyAddress("127.0.0.1", 1),), 80)
        found = ServerDirectory({"onion": theirs})
        self.assertEqual(found.onion_settings(self.directory, None, None)["onion"], theirs)
        expected = OnionSettings(Path("key"), (ProxyAddress("127.0.0.1", 2),), 80)
        given = found.onion_settings(self.directory, None, "tcp:127.0.0.1:2")
        self.assertEqual(given["onion"], expected)

    def names(self, found: ServerDirectory, *given: str) -> list[str]:
        """Return the names of the introducers that are chosen."""
        return sorted(introducers_of(self.directory, found, given))

    def test_by_default(self) -> None:
        """A Tahoe-LAFS node's server goes on to be announced; any other one only if that is asked for."""
        self.assertEqual(self.names(self.theirs), ["grid"])
        self.assertEqual(self.names(self.ours), [])

    def test_choices(self) -> None:
        """All that are given, those of the directory, both, or none."""
        other = self.furl.replace("example", "other")
        self.assertEqual(self.names(self.ours, "configured"), ["grid"])
        self.assertEqual(self.names(self.theirs, other), ["introducer-1"])
        self.assertEqual(self.names(self.theirs, other, "configured"), ["grid", "introducer-1"])
        self.assertEqual(self.names(self.theirs, "none"), [])

    def test_refusals(self) -> None:
        """Contradictions, no introducers where some are asked for, and what is no fURL."""
        nobody = ServerDirectory()
        other = Path(self.mktemp())
        (other / "private").mkdir(parents=True)
        (other / "private/introducer.furl").write_text("pb://")
        with self.assertRaisesRegex(
            UsageError, "is an introducer's directory, since it has private/"
        ):
            serve_settings.load(other)
        for found, given in (
            (self.theirs, ("none", self.furl)),
            (nobody, ("configured",)),
            (nobody, ("pb://nowhere",)),
        ):
            self.assertRaises(UsageError, introducers_of, self.directory, found, given)

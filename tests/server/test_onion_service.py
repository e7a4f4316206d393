"""An onion service, with a Tor that is a few lines of its control protocol."""

from __future__ import annotations

import base64
import hmac
import os
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.logger import globalLogPublisher
from twisted.protocols.basic import LineOnlyReceiver
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.errors import UsageError
from pipegrid.reactor import tor_control_port
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS, ProxyAddress
from pipegrid.reactor.tcp_socks5_endpoints import ProxyError
from pipegrid.reactor.tor_control_port import TorControl, connect_control, listeners_in
from pipegrid.server.onion_service import KEY_NAME, OnionService, OnionSettings, load_onion_key
from pipegrid.server.serve import ServeSettings, StorageNode, check_hidden

reactor: Any = installed_reactor

KEY = "ED25519-V3:" + base64.b64encode(b"k" * 64).decode()
NAME = "a" * 56
COOKIE = b"c" * 32


class FakeTor(Factory):
    """Tor's control port."""

    noisy = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connections: list[Any] = []
        self.name = NAME
        self.phases = ["PROGRESS=100 TAG=done"]
        self.taken = 0
        self.refuses = ""
        self.hangs_up = False
        self.floods = False
        self.methods = "COOKIE,SAFECOOKIE"
        handle, self.cookie = tempfile.mkstemp(dir=Path.cwd())
        os.write(handle, COOKIE)
        os.close(handle)

    def buildProtocol(self, addr: Any) -> FakeControl:
        return FakeControl(self)


class FakeControl(LineOnlyReceiver):
    """One connection to the control port."""

    def __init__(self, tor: FakeTor) -> None:
        self._tor = tor

    def connectionMade(self) -> None:
        self._tor.connections.append(self)

    def connectionLost(self, reason: Any = None) -> None:
        self._tor.connections.remove(self)

    def lineReceived(self, line: bytes) -> None:
        text = line.decode()
        word = text.split(" ")[0]
        if word == "PROTOCOLINFO":
            if self._tor.floods:
                self.transport.write(b"250-x\r\n" * (1 << 18))  # type: ignore[union-attr]
                return
            method = f'250-AUTH METHODS={self._tor.methods} COOKIEFILE="{self._tor.cookie}"'
            answer = ["250-PROTOCOLINFO 1", method, '250-VERSION Tor="0.4.7.1"']
        elif word == "AUTHCHALLENGE":
            shown = COOKIE + bytes.fromhex(text.split(" ")[2]) + bytes(32)
            proof = hmac.digest(
                b"Tor safe cookie authentication server-to-controller hash", shown, "sha256"
            )
            self.sendLine(
                f"250 AUTHCHALLENGE SERVERHASH={proof.hex().upper()} SERVERNONCE={'0' * 64}".encode()
            )
            return
        elif word == "GETINFO" and text.endswith("net/listeners/socks"):
            answer = ['250-net/listeners/socks="127.0.0.1:9055" "unix:/run/x"']
        elif word == "GETINFO" and "version" in text:
            answer = ["250-version=0.4.7.1"]
        elif word == "GETINFO" and text.endswith("status/bootstrap-phase"):
            phases = self._tor.phases
            phase = phases.pop(0) if len(phases) > 1 else phases[0]
            answer = [f"250-status/bootstrap-phase=NOTICE BOOTSTRAP {phase}"]
        elif word == "TAKEOWNERSHIP":
            self._tor.taken += 1
            answer = []
        elif word == "GETINFO":
            answer = [f"250-{each}=" for each in text.split(" ")[1:]]
        elif word == "ADD_ONION":
            self._tor.asked.append(text)
            if self._tor.hangs_up:
                self.transport.abortConnection()  # type: ignore[union-attr]
                return
            if self._tor.refuses:
                self.sendLine(self._tor.refuses.encode())
                return
            answer = [f"250-ServiceID={self._tor.name}"]
            if "NEW:" in text:
                answer.append(f"250-PrivateKey={KEY}")
        else:
            answer = []
        for each in [*answer, "250 OK"]:
            self.sendLine(each.encode())


class OnionServiceTests(TestCase):
    """Adding, keeping and removing it."""

    timeout = 30

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "private").mkdir(parents=True)
        self.key = self.directory / KEY_NAME
        self.tor = FakeTor()
        self.listening = reactor.listenTCP(0, self.tor, interface="127.0.0.1")
        self.addCleanup(lambda: self.listening.stopListening())
        self.address = ProxyAddress("127.0.0.1", self.listening.getHost().port)
        nowhere = ProxyAddress("127.0.0.1", 1)
        self.settings = OnionSettings(self.key, (nowhere, self.address))

    def test_the_key_is_kept(self) -> Deferred[None]:
        """The first time Tor makes it; from then on the service has the same name."""
        return Deferred.fromCoroutine(self._test_the_key())

    async def _test_the_key(self) -> None:
        for expected in ("NEW:ED25519-V3", KEY):
            service = OnionService(reactor, self.settings, 4711)
            await service.start()
            self.assertEqual(service.hint, f"tor:{NAME}.onion:3457")
            self.assertEqual(self.tor.asked[-1], f"ADD_ONION {expected} Port=3457,127.0.0.1:4711")
            await service.stop()
            while self.tor.connections:
                await deferLater(reactor, 0.01)
        self.assertEqual(self.key.read_text(), KEY + "\n")
        self.assertEqual(self.key.stat().st_mode & 0o777, 0o600)

    def test_tor_restarts(self) -> Deferred[None]:
        """The service is added again, under its name and no other."""
        return Deferred.fromCoroutine(self._test_restarts())

    async def _test_restarts(self) -> None:
        service = OnionService(reactor, self.settings, 4711)
        await service.start()
        self.tor.connections[0].transport.loseConnection()
        while len(self.tor.asked) < 2:
            await deferLater(reactor, 0.01)
        self.assertIn(KEY, self.tor.asked[1])
        await service.stop()
        while self.tor.connections:
            await deferLater(reactor, 0.01)

    def test_failures(self) -> Deferred[None]:
        """Each is one sentence, and leaves no connection."""
        return Deferred.fromCoroutine(self._test_failures())

    async def _test_failures(self) -> None:
        async def fails(words: str) -> None:
            with self.assertRaises(UsageError) as caught:
                await OnionService(reactor, self.settings, 1).start()
            self.assertIn(words, str(caught.exception))
            while self.tor.connections:
                await deferLater(reactor, 0.01)

        self.tor.refuses = "513 Bad arguments"
        await fails("Tor does not add the onion service: ")
        self.tor.refuses = ""
        self.tor.name = "x"
        await fails("does not say which onion service")
        self.tor.name = NAME
        self.key.write_text("RSA1024:abc\n")
        await fails("does not hold the key of an onion service of version 3")
        self.key.unlink()
        await self.listening.stopListening()
        await fails("was not found at")

    def test_the_key_stays_secret(self) -> Deferred[None]:
        """A Tor that hangs up, or repeats the key, brings it neither into an error nor into the log."""
        return Deferred.fromCoroutine(self._test_secret())

    async def _test_secret(self) -> None:
        self.key.write_text(KEY + "\n")
        logged: list[str] = []
        observe: Any = lambda event: logged.append(repr(event))  # noqa: E731
        globalLogPublisher.addObserver(observe)
        self.addCleanup(globalLogPublisher.removeObserver, observe)
        for hangs_up, refuses in ((True, ""), (False, f"512 bad key {KEY}")):
            self.tor.hangs_up, self.tor.refuses = hangs_up, refuses
            with self.assertRaises(UsageError) as caught:
                await OnionService(reactor, self.settings, 1).start()
            self.assertIn("Tor does not add the onion service: ", str(caught.exception))
            self.assertNotIn("ED25519-V3", str(caught.exception))
        self.assertTrue(all(KEY in each for each in self.tor.asked))
        service = OnionService(reactor, self.settings, 1)
        self.tor.hangs_up, self.tor.refuses = False, ""
        await service.start()
        self.tor.hangs_up = True
        count = len(self.tor.asked)
        self.tor.connections[0].transport.loseConnection()
        while len(self.tor.asked) < count + 2:
            await deferLater(reactor, 0.01)
        await service.stop()
        self.assertIn("onion service is not reachable", "".join(logged))
        self.assertNotIn(KEY, "".join(logged))
        while self.tor.connections:
            await deferLater(reactor, 0.01)

    def test_another_end(self) -> Deferred[None]:
        """What listens in Tor's place gets no key, no other file, and no more memory than it may."""
        return Deferred.fromCoroutine(self._test_another_end())

    async def _test_another_end(self) -> None:
        async def fails(words: str) -> None:
            with self.assertRaises(ProxyError) as caught:
                await connect_control(reactor, self.address)
            self.assertIn(words, str(caught.exception))
            while self.tor.connections:
                await deferLater(reactor, 0.01)

        for methods in ("NULL", "COOKIE", "HASHEDPASSWORD", "SAFECOOKIE METHODS=COOKIE"):
            self.tor.methods = methods
            await fails("does not offer SAFECOOKIE")
        self.tor.methods = "COOKIE,SAFECOOKIE,HASHEDPASSWORD"
        fifo, long = self.directory / "fifo", self.directory / "long"
        os.mkfifo(fifo)
        long.write_bytes(b"c" * 33)
        cookie = self.tor.cookie
        for path in ("/dev/zero", str(fifo), str(long), str(self.directory)):
            self.tor.cookie = path
            await fails("is not a file of 32 bytes")
        wrong = self.directory / "wrong"
        wrong.write_bytes(b"d" * 32)
        self.tor.cookie = str(wrong)
        await fails("Server hash not expected")
        self.tor.cookie = cookie
        self.tor.floods = True
        await fails("cannot be used")

    def test_cancelled(self) -> Deferred[None]:
        """Waiting for an end that is silent ends at once, and leaves no connection."""
        return Deferred.fromCoroutine(self._test_cancelled())

    async def _test_cancelled(self) -> None:
        self.patch(FakeControl, "lineReceived", lambda self, line: None)
        waiting = Deferred.fromCoroutine(connect_control(reactor, self.address))
        while not self.tor.connections:
            await deferLater(reactor, 0.01)
        waiting.cancel()
        with self.assertRaises(CancelledError):
            await waiting
        self.patch(tor_control_port, "CONTROL_S", 0.05)
        with self.assertRaises(ProxyError):
            await connect_control(reactor, self.address)
        while self.tor.connections:
            await deferLater(reactor, 0.01)

    def test_the_socks_port(self) -> Deferred[None]:
        """A client asks for it once."""
        return Deferred.fromCoroutine(self._test_the_socks_port())

    async def _test_the_socks_port(self) -> None:
        control = TorControl(self.address)
        expected = (ProxyAddress("127.0.0.1", 9055), ProxyAddress("", 0, "/run/x"))
        self.assertEqual(await control.socks_addresses(reactor), expected)
        await self.listening.stopListening()
        self.assertEqual(await control.socks_addresses(reactor), expected)
        with self.assertRaises(ProxyError):
            await TorControl(self.address).socks_addresses(reactor)
        while self.tor.connections:
            await deferLater(reactor, 0.01)

    def test_a_server(self) -> Deferred[None]:
        """Its only address for clients is that of the onion service; it listens on this machine only."""
        return Deferred.fromCoroutine(self._test_a_server())

    async def _test_a_server(self) -> None:
        settings = ServeSettings(
            directory=self.directory,
            port="tcp:0:interface=127.0.0.1",
            onion=self.settings,
            connections=DIRECT_CONNECTIONS._replace(hides_address=True),
            durability="none",
        )
        node = StorageNode(reactor, settings)
        await node.start()
        self.assertEqual(len(node.nurls), 1)
        self.assertTrue(node.nurl.startswith("pb+tor://"))
        self.assertIn(f"@{NAME}.onion:3457/", node.nurl)
        self.assertIn(f"@tor:{NAME}.onion:3457/", node.furl)
        self.assertEqual(node._ports[0].getHost().host, "127.0.0.1")
        await node.stop()
        while self.tor.connections:
            await deferLater(reactor, 0.01)


class HiddenTests(SynchronousTestCase):
    """A server that must not reveal its address."""

    def test_locations(self) -> None:
        """What would reveal it is refused before it listens."""
        hides = DIRECT_CONNECTIONS._replace(hides_address=True)
        onion = OnionSettings(Path("key"))
        for port, location, service, words in (
            ("tcp:1", None, None, "must be given"),
            ("tcp:1", "example.org:1", None, "must not contain 'example.org:1'"),
            ("tcp:1", "tor:a.onion:1,tcp:10.0.0.1:1", None, "must not contain 'tcp:10.0.0.1:1'"),
            ("tcp:1", None, onion, "is open to others"),
            ("8098", None, onion, "is open to others"),
            ("tcp:1:interface=127.0.0.1,tcp:2", None, onion, "'tcp:2' is open to others"),
            ("tcp:1:interface=127.0.0.1.example", None, onion, "is open to others"),
            ("tcp:1:interface=127.0.0.1", "tcp:a.b:1", onion, "must not contain"),
            ("tcp:1:interface=\\:\\:1", None, onion, "is open to others"),
            ("tcp:1:interface=127.0.0.1:interface=0.0.0.0", None, onion, "is open to others"),
            ("tcp:1", "tor:10.0.0.1:1", None, "must not contain 'tor:10.0.0.1:1'"),
            ("tcp:1", "tor:a.onion:1,i2p:a.b:1", None, "must not contain 'i2p:a.b:1'"),
        ):
            settings = ServeSettings(
                directory=Path("x"), port=port, location=location, connections=hides, onion=service
            )
            with self.assertRaises(UsageError, msg=(port, location)) as caught:
                check_hidden(settings)
            self.assertIn(words, str(caught.exception))
        for port, location, service in (
            ("tcp:1", "tor:a.onion:1", None),
            ("tcp:1:interface=127.0.0.1", None, onion),
            ("tcp:1:interface=127.0.0.1", "tor:a.onion:1", onion),
        ):
            check_hidden(
                ServeSettings(
                    directory=Path("x"),
                    port=port,
                    location=location,
                    connections=hides,
                    onion=service,
                )
            )

    def test_keys(self) -> None:
        """None is no error; another text is."""
        path = Path(self.mktemp())
        self.assertIsNone(load_onion_key(path))
        path.write_text(KEY)
        self.assertEqual(load_onion_key(path), KEY)

    def test_listeners(self) -> None:
        """Tor's answer, as it quotes it."""
        self.assertEqual(listeners_in(""), ())
        self.assertEqual(len(listeners_in('"127.0.0.1:9050" "unix:/a" odd')), 2)

"""Foolscap over real connections: one port, one identity and one share store for both protocols."""

from __future__ import annotations

import os
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.protocols.tls import BufferingTLSTransport
from twisted.trial.unittest import TestCase

from pipegrid.errors import NoSuchShare, ServerRefused, ServerUnreachable, UsageError
from pipegrid.reactor.bulk_tls import BatchingTLS, is_ours
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS, NO_CONNECTIONS
from pipegrid.server import serve
from pipegrid.server.serve import ServeSettings
from pipegrid.transport.foolscap.client import FoolscapServer
from pipegrid.transport.foolscap.link import LONGEST_WORD_BYTES, MAX_HINTS, ShortWords, TubConnector
from pipegrid.transport.gbs.client import GbsServer, endpoints_for
from pipegrid.transport.interface import StorageServer
from pipegrid.wire import server_address
from tests.transport.contract import IDENTITY, SECRETS, SI, Consumer


class LoopbackTests(TestCase):
    """A node that listens."""

    timeout = 30

    async def start(self, port: int = 0) -> serve.StorageNode:
        """Start a node that does not outlive the test."""
        settings = ServeSettings(directory=self.directory, port=f"tcp:{port}:interface=127.0.0.1")
        node = await serve.start(reactor, settings)
        self.addCleanup(node.stop)
        return node

    def connect(self, address: server_address.Furl) -> FoolscapServer:
        """Return a client that does not outlive the test."""
        server = FoolscapServer(IDENTITY, TubConnector(address, DIRECT_CONNECTIONS), reactor)
        self.addCleanup(server.disconnect)
        return server

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())

    def test_one_server(self) -> Deferred[None]:
        """What is put over Foolscap is found over HTTPS, and the reverse; both know the same secret."""
        return Deferred.fromCoroutine(self._test_one_server())

    async def _test_one_server(self) -> None:
        node = await self.start()
        foolscap = self.connect(server_address.parse_furl(node.furl))
        address = server_address.parse_nurl(node.nurl)
        self.assertEqual(address.swissnum, server_address.parse_furl(node.furl).swissnum)
        endpoints = endpoints_for(reactor, address, "s", DIRECT_CONNECTIONS)
        https = GbsServer(IDENTITY, address, endpoints, reactor)
        self.addCleanup(https.disconnect)
        await foolscap.version()
        await https.version()
        front = node._front
        assert front is not None
        # Both have shown the secret, so that no stranger takes their places.
        self.assertEqual((len(front._crowd), front._crowd.unauthenticated), (2, 0))
        data = os.urandom(700_000)
        ways: list[tuple[StorageServer, StorageServer]] = [(foolscap, https), (https, foolscap)]
        for number, (one, other) in enumerate(ways):
            await one.allocate(SI, {number}, len(data), SECRETS)
            writes = [
                one.write(SI, number, at, [data[at : at + 100_000]], SECRETS.upload)
                for at in range(0, len(data), 100_000)
            ]
            results = [await each for each in writes]
            self.assertTrue(results[-1].complete)
            consumer = Consumer()
            await other.stream(SI, number, 0, len(data), consumer)
            self.assertEqual(consumer.data, data)
        self.assertEqual(await https.list_shares(SI), await foolscap.list_shares(SI))
        await foolscap.add_lease(SI, SECRETS.lease)
        await foolscap.advise_corrupt_share(SI, 1, "it smells")
        self.assertEqual(len(list((node.storage / "corruption-advisories").iterdir())), 1)
        said = (await foolscap.version()).application, (await https.version()).application
        self.assertEqual(said[0], said[1])

    def test_tls_for_bulk(self) -> Deferred[None]:
        """Twisted's TLS, which Foolscap starts, becomes ours; should Twisted change, this says so."""
        return Deferred.fromCoroutine(self._test_tls_for_bulk())

    async def _test_tls_for_bulk(self) -> None:
        node = await self.start()
        connector = TubConnector(server_address.parse_furl(node.furl), DIRECT_CONNECTIONS)
        self.addCleanup(connector.close)
        storage = await connector.connect()
        transport = storage.tracker.broker.transport
        self.assertIs(type(transport.protocol), BufferingTLSTransport)
        if is_ours():
            self.assertIs(transport.protocol._write.__func__, BatchingTLS._write)
        self.assertGreater(transport.bufferSize, 65536)
        broker = storage.tracker.broker
        self.assertIs(type(broker.outgoingVocabulary), ShortWords)
        answer = await storage.callRemote("get_version")
        self.assertIn(b"application-version", answer)

    def test_the_same_key_as_over_https(self) -> Deferred[None]:
        """Who is to be the owner of a NURL's key, besides the fURL's certificate, is nobody else."""
        return Deferred.fromCoroutine(self._test_same_key())

    async def _test_same_key(self) -> None:
        node = await self.start()
        address, pin = (
            server_address.parse_furl(node.furl),
            server_address.parse_nurl(node.nurl).spki_hash,
        )
        for key in (pin, pin[::-1]):
            server = FoolscapServer(
                IDENTITY, TubConnector(address, DIRECT_CONNECTIONS, pin=key), reactor
            )
            self.addCleanup(server.disconnect)
            if key is pin:
                await server.version()
                continue
            with self.assertRaises(ServerUnreachable) as caught:
                await server.version()
            self.assertIn("cannot connect", str(caught.exception))
            self.assertIn("key", str(caught.exception))

    def test_words(self) -> None:
        """What is abbreviated is short; a long string is not even hashed."""

        class Long(bytes):
            def __hash__(self) -> int:
                raise AssertionError("this takes time")

        words = ShortWords({b"call": 1})
        found = [
            word in words for word in (b"call", b"cal", b"", Long(bytes(LONGEST_WORD_BYTES + 1)))
        ]
        self.assertEqual(found, [True, False, False, False])

    def test_wrong_addresses(self) -> Deferred[None]:
        """Another secret, another key, nobody there: each a sentence that says so."""
        return Deferred.fromCoroutine(self._test_wrong_addresses())

    async def _test_wrong_addresses(self) -> None:
        node = await self.start()
        right = server_address.parse_furl(node.furl)
        for address, error, words in (
            (server_address.Furl(right.tub_id, right.hints, "wrong"), ServerRefused, "secret"),
            (
                server_address.Furl(b"x" * 20, right.hints, right.swissnum),
                ServerUnreachable,
                "another key",
            ),
            (
                server_address.Furl(right.tub_id, ("tcp:127.0.0.1:1",), "x"),
                ServerUnreachable,
                "cannot connect",
            ),
        ):
            with self.assertRaises(error) as caught:
                await self.connect(address).version()
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(UsageError):
            TubConnector(
                server_address.Furl(right.tub_id, ("tor:abc.onion:1",), "x"), NO_CONNECTIONS
            )

    def test_many_addresses(self) -> None:
        """Of a hundred addresses, to all of which Foolscap would connect at once, the first are tried."""
        hints = tuple(f"tcp:127.0.0.1:{port}" for port in range(1, 101))
        connector = TubConnector(
            server_address.Furl(b"x" * 20, ("tor:abc.onion:1", *hints), "x"), DIRECT_CONNECTIONS
        )
        self.assertEqual(server_address.parse_furl(connector._furl).hints, hints[:MAX_HINTS])

    def test_restart(self) -> Deferred[None]:
        """A server that stops forgets what was not closed; the same client goes on with the next one."""
        return Deferred.fromCoroutine(self._test_restart())

    async def _test_restart(self) -> None:
        # A port that the kernel chose it may give to somebody else's connection meanwhile.
        port = free_port()
        node = await self.start(port)
        address = server_address.parse_furl(node.furl)
        server = self.connect(address)
        await server.allocate(SI, {0, 1}, 6, SECRETS)
        await server.write(SI, 0, 0, [b"whole!"], SECRETS.upload)
        await server.write(SI, 1, 0, [b"ha"], SECRETS.upload)
        await node.stop()
        self.assertEqual(list((node.storage / "shares/incoming").iterdir()), [])
        with self.assertRaises(ServerUnreachable):
            await server.version()
        again = await self.start(port)
        self.assertEqual(again.furl, node.furl)
        self.assertEqual(await server.read(SI, 0, 0, 10), b"whole!")
        with self.assertRaises(NoSuchShare):
            await server.write(SI, 1, 2, [b"lf"], SECRETS.upload)

"""The proxy says where it listens, relays, and ends when told, in this process and in one of its own."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import attrs
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest.child_processes import ChildError, start_child
from pipegrid.speedtest.link_proxies import Forwarding, parse_pair, proxy_main, start_proxy
from pipegrid.speedtest.raw_tcp_baseline import ping_responders
from pipegrid.speedtest.responder import start_responders
from pipegrid.speedtest.responder_client import ResponderError
from pipegrid.testing.link_relay import LinkShape

reactor: Any = installed_reactor


class PairTests(SynchronousTestCase):
    """What to relay, as people write it."""

    def test_pairs(self) -> None:
        """With or without an address to listen on, names, numbers, IPv6."""
        for text, pair in (
            ("8000=example.net:80", Forwarding("127.0.0.1", 8000, "example.net", 80)),
            ("0.0.0.0:8000=10.1.2.3:443", Forwarding("0.0.0.0", 8000, "10.1.2.3", 443)),
            ("[::1]:0=[fe80::1]:22", Forwarding("::1", 0, "fe80::1", 22)),
        ):
            self.assertEqual(parse_pair(text), pair)

    def test_what_is_no_pair_gets_a_sentence(self) -> None:
        """Missing parts, ports that are none."""
        for text in ("", "8000", "8000=", "8000=host", "=host:80", "x=host:80", "8000=host:0"):
            error = self.assertRaises(UsageError, parse_pair, text)
            self.assertIn("8000=example.net:80", str(error), text)
        for text in ("65536=host:80", "1=host:65536", "1=a b:80", "1=::1:80"):
            self.assertRaises(UsageError, parse_pair, text)


class ProxyTests(TestCase):
    """In this process."""

    def test_it_says_where_relays_and_ends(self) -> None:
        """Cancelling it is the good end: the ports are closed."""

        async def relay() -> None:
            running = await start_responders(reactor, 1)
            try:
                responder = running.responders[0]
                said: list[str] = []
                pairs = [Forwarding("127.0.0.1", 0, "localhost", responder.port)] * 2
                proxying = proxy_main(reactor, LinkShape(0.002), pairs, said.append)
                self.assertEqual(len(said), 2)
                ports = []
                for line in said:
                    match = re.fullmatch(r"127\.0\.0\.1:(\d+) -> localhost:(\d+)", line)
                    assert match is not None, line
                    ports.append(int(match[1]))
                behind = [attrs.evolve(responder, port=port) for port in ports]
                for trip in await ping_responders(reactor, behind, 3):
                    self.assertGreater(trip.minimum_s, 0.0009)
                proxying.cancel()
                await proxying
                try:
                    await ping_responders(reactor, behind, 1)
                except ResponderError as error:
                    self.assertIn("could be reached", str(error))
                else:
                    self.fail("it still listens")
            finally:
                await running.stop()

        return Deferred.fromCoroutine(relay())  # type: ignore[return-value]

    def test_a_port_that_is_taken(self) -> None:
        """Gets a sentence, and those that were had are given back."""

        async def relay() -> None:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                pairs = [
                    Forwarding("127.0.0.1", port, "127.0.0.1", 9)
                    for port in (0, taken.getsockname()[1])
                ]
                try:
                    await proxy_main(reactor, LinkShape(), pairs, lambda _: None)
                except UsageError as error:
                    self.assertIn("choose another port", str(error))
                else:
                    self.fail("it listens where another does")

        return Deferred.fromCoroutine(relay())  # type: ignore[return-value]


class ChildrenTests(TestCase):
    """In processes of their own."""

    def test_a_proxy_before_responders(self) -> None:
        """The round trip is there, never less; when both are stopped no process is left."""

        async def relay() -> None:
            responders = await start_responders(reactor, 2)
            try:
                targets = [(each.host, each.port) for each in responders.responders]
                proxy = await start_proxy(reactor, LinkShape(0.02), targets)
                try:
                    behind = [
                        attrs.evolve(each, port=port)
                        for each, port in zip(responders.responders, proxy.said, strict=True)
                    ]
                    for trip in await ping_responders(reactor, behind, 2):
                        self.assertGreater(trip.minimum_s, 0.018)
                finally:
                    await proxy.stop()
            finally:
                await responders.stop()
            for child in (proxy, *responders.children):
                self.assertRaises(ProcessLookupError, os.kill, child.pid, 0)

        return Deferred.fromCoroutine(relay())  # type: ignore[return-value]

    def test_a_child_that_does_not_start(self) -> None:
        """Is an error, whose sentence names it."""

        async def start() -> None:
            try:
                await start_child(reactor, "pipegrid.speedtest.link_proxies", {})
            except ChildError as error:
                self.assertIn("pipegrid.speedtest.link_proxies", str(error))
            else:
                self.fail("that is no child")

        return Deferred.fromCoroutine(start())  # type: ignore[return-value]

"""
How PipeGrid and Tahoe-LAFS's gateway are compared: what is promised, and what is printed.

That it runs with Tahoe-LAFS's own processes, ``make interop`` shows.
"""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

from misc.speedtest.peers import __main__ as peers
from misc.speedtest.peers import nodes
from misc.speedtest.peers.clients import run_all
from misc.speedtest.peers.contest import (
    AT_ONCE,
    GET,
    HUNDRED_MEGABYTES,
    ONE,
    PUT,
    SCENARIOS,
    TARGETS,
    Comparison,
    Samples,
    table,
)
from misc.speedtest.peers.nodes import FOOLSCAP, HTTPS, Address, GatewayFailed, servers_file
from misc.speedtest.peers.operations import OPERATIONS
from twisted.internet.defer import Deferred, fail, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import CorruptionError
from pipegrid.grid.servers_and_introducers_yaml import parse_static_servers
from pipegrid.speedtest.benchmark_clients import Comparing
from pipegrid.wire.server_address import Furl, Nurl

ADDRESS = Address(
    "somebody",
    Nurl(b"s" * 32, "127.0.0.1", 1234, "secret"),
    Furl(b"t" * 20, ("tcp:127.0.0.1:1234",), "secret"),
)


def samples(*seconds: float) -> Samples:
    """Return samples that took so long."""
    return Samples(list(seconds), [0.1] * len(seconds), [0.2] * len(seconds))


def compare(pipegrid: Samples, tahoe: Samples, way: str = PUT, rtt_ms: float = 100.0) -> Comparison:
    """Return a comparison of single files of 200 bytes."""
    return Comparison(rtt_ms, HTTPS, HTTPS, ONE, way, pipegrid, tahoe)


class ComparisonTests(SynchronousTestCase):
    """``misc/speedtest/peers/contest.py``."""

    def test_ratio_of_medians(self) -> None:
        """A figure is the quotient of both medians, with the spread of the rounds beside it."""
        found = compare(samples(1.0, 2.0, 9.0), samples(6.0, 8.0, 9.0))
        line = json.loads(json.dumps(found.as_json()))
        self.assertEqual((line["ratio"], line["ratio_spread"]), (4.0, [1.0, 6.0]))
        self.assertEqual(line["pipegrid"]["spread_s"], [1.0, 9.0])
        self.assertEqual((line["scenario"], line["rounds"]), ("put 1 x 200 B", 3))

    def test_met_or_not(self) -> None:
        """A promise is kept from its very number on; where there is none, nothing is judged."""
        self.assertIs(compare(samples(1.0), samples(3.0)).met, True)
        self.assertIs(compare(samples(1.0), samples(2.99)).met, False)
        self.assertIs(compare(samples(1.0), samples(2.99), GET).met, True)
        self.assertIsNone(compare(samples(1.0), samples(9.0), rtt_ms=20.0).met)

    def test_every_target_is_measured(self) -> None:
        """Each promise belongs to a scenario, a round trip and a protocol that are measured by default."""
        options: Any = type("Options", (), {"only": "", "against": None})
        names = {each.name: each for each in SCENARIOS}
        operations = {(each.what, each.verb) for each in OPERATIONS}
        for rtt_ms, against, name, way in TARGETS:
            self.assertIn(rtt_ms, peers.RTTS_MS)
            if (name, way) in operations:
                operations.discard((name, way))
                continue
            self.assertIn(way, (PUT, GET))
            self.assertTrue(peers.wanted(rtt_ms, against, names[name], options), name)
        self.assertFalse(peers.wanted(100.0, FOOLSCAP, HUNDRED_MEGABYTES, options))
        self.assertFalse(peers.wanted(0.0, FOOLSCAP, AT_ONCE, options))

    def test_table(self) -> None:
        """People see what was promised, and what was not kept."""
        text = table(
            [compare(samples(1.0), samples(2.0)), compare(samples(1.0), samples(2.0), GET)]
        )
        header, put, get = text.splitlines()
        self.assertTrue(header.startswith("RTT"))
        self.assertIn("NOT MET", put)
        self.assertTrue(get.endswith("2.0    2       met"), get)


class ClientsTests(SynchronousTestCase):
    """``misc/speedtest/peers/clients.py`` and ``nodes.py``."""

    def test_in_series_or_at_once(self) -> None:
        """In series a file begins when the one before is done; at once all begin together."""
        for at_once in (False, True):
            began: list[Deferred[int]] = []

            def call(began: list[Deferred[int]] = began) -> Deferred[int]:
                began.append(Deferred())
                return began[-1]

            done = Deferred.fromCoroutine(run_all([call] * 3, at_once))
            self.assertEqual(len(began), 3 if at_once else 1)
            for number in range(3):
                began[number].callback(number)
            self.assertEqual(self.successResultOf(done), [0, 1, 2])

    def test_both_read_the_same_servers_file(self) -> None:
        """It names fURL and NURL, or the fURL alone, behind whichever port the relay has."""
        for protocol in (HTTPS, FOOLSCAP):
            text = servers_file([ADDRESS.at(4321)], protocol)
            [known] = parse_static_servers(text.encode(), "a test").servers
            self.assertEqual(known.nurl is not None, protocol == HTTPS)
            assert known.furl is not None
            self.assertEqual(known.furl.hints, ("tcp:127.0.0.1:4321",))
            self.assertEqual(known.identity.nickname, "somebody")

    def test_no_round_trip_needs_no_relay(self) -> None:
        """At 0 ms both speak with the servers themselves."""
        self.assertEqual(peers.start_relay(None, [ADDRESS], 0.0), [ADDRESS])  # type: ignore[arg-type]

    def test_pipegrids_directory(self) -> None:
        """It encodes as the gateway does, and finds what the file names."""
        directory = Path(self.mktemp())
        peers.make_client(directory, [ADDRESS], HTTPS)
        self.assertIn("shares.happy = 7", (directory / "pipegrid.cfg").read_text())

    def test_what_a_node_has_for_a_moment(self) -> None:
        """It is where its shares are, in memory if they are: each answer is a file before it is sent."""
        directory = Path(self.mktemp()).absolute()
        program = directory.with_name("tahoe")
        program.write_text('#!/bin/sh\necho "$1 $TMPDIR"\n')
        program.chmod(0o700)
        self.patch(nodes, "TAHOE", str(program))
        node = nodes.Node(directory, "")
        node.start()
        node.wait_stopped()
        self.assertEqual(directory.with_suffix(".log").read_text(), f"run {directory / 'tmp'}\n")
        self.assertTrue((directory / "tmp").is_dir())


class _Client:
    """Stores files in memory, and gives back, or fails with, what it is told to."""

    name = "pipegrid"

    def __init__(self, spoil: bool = False, failing: int = 0) -> None:
        self._files: dict[str, bytes] = {}
        self._spoil = spoil
        self._failing = failing

    def warm(self) -> Deferred[Any]:
        return succeed(None)

    def put(self, data: bytes) -> Deferred[str]:
        if len(data) == ONE.size and self._failing:
            self._failing -= 1
            return fail(GatewayFailed("busy"))
        cap = str(len(self._files))
        self._files[cap] = data
        return succeed(cap)

    def get(self, cap: str, sink: Comparing) -> Deferred[Any]:
        data = self._files[cap]
        sink.write(b"x" * len(data) if self._spoil and len(data) == 200 else data)
        return succeed(None)

    def cpu_s(self) -> float:
        return 0.0


class _NoServers:
    nodes: tuple[()] = ()

    def forget(self) -> None:
        pass


class BenchTests(SynchronousTestCase):
    """``misc/speedtest/peers/__main__.py``."""

    def setUp(self) -> None:
        # The collector is run before each round. It need not look at the modules of all other tests.
        gc.freeze()
        self.addCleanup(gc.unfreeze)

    def compare(self, client: _Client) -> Deferred[dict[tuple[str, str], Samples]]:
        """Measure two rounds of one file."""
        bench = peers.Bench(_NoServers(), random.Random(1))  # type: ignore[arg-type]
        return Deferred.fromCoroutine(bench.compare([client], ONE, 2))

    def test_rounds(self) -> None:
        """Each round gives a sample for each direction; the one that warms up gives none."""
        found = self.successResultOf(self.compare(_Client()))
        self.assertEqual(
            {key: len(each.seconds) for key, each in found.items()},
            {
                ("pipegrid", PUT): 2,
                ("pipegrid", GET): 2,
            },
        )

    def test_wrong_bytes_give_no_figure(self) -> None:
        """What comes back is compared."""
        self.failureResultOf(self.compare(_Client(spoil=True)), CorruptionError)

    def test_a_gateway_that_gives_up(self) -> None:
        """The round is repeated and leaves no sample; a gateway that does nothing else is an error."""
        found = self.successResultOf(self.compare(_Client(failing=3)))
        self.assertEqual(len(found["pipegrid", PUT].seconds), 2)
        self.failureResultOf(self.compare(_Client(failing=peers.ATTEMPTS)), GatewayFailed)

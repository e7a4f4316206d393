"""
What is wrong in a client's directory, or on the grid, beside Tahoe-LAFS's good servers: a sentence each, and
work goes on with the others.

``make interop`` runs it. What ``pipegrid`` says is what a person sees: each command is a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from subprocess import CompletedProcess
from typing import Any

from foolscap.api import Referenceable
from misc.speedtest.peers.nodes import free_port
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site
from zope.interface import implementer

from pipegrid.grid.client_paths import INTRODUCERS_NAME, SERVERS_NAME
from pipegrid.grid.introducer_discovery import cache_name, read_cache
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.server import identity
from pipegrid.wire import cbor
from pipegrid.wire.announcements import FURL, NURLS, make_signing_key, sign
from pipegrid.wire.foolscap_broker import make_tub
from pipegrid.wire.foolscap_interfaces import RIStorageServer
from pipegrid.wire.introducer_protocol import LOST_AFTER_S
from tests.grid.introducer_support import RealIntroducer
from tests.interop.processes import TahoeGrid, run_pipegrid

reactor: Any = installed_reactor

FUTURE = {
    b"http://allmydata.org/tahoe/protocols/storage/v9": {b"sizes": 7},
    b"application-version": b"later/9",
}

SKIPPED = {
    "furl-as-nurl": "is skipped: one of its anonymous-storage-NURLs cannot be used: that is a fURL",
    "nurl-as-furl": "is skipped: its anonymous-storage-FURL cannot be used: that is a storage server's NURL",
    "future-nurl": "is skipped: one of its anonymous-storage-NURLs cannot be used: the NURL is of a version",
}
"""Entries of ``servers.yaml`` that are no servers, and what is said of each."""

UNREACHABLE = {
    "wrong-key-nurl": "is not the server it should be",
    "wrong-key-furl": "another server, with another key",
    "wrong-secret-nurl": "does not know the secret in its address; copy its NURL again",
    "wrong-secret-furl": "does not know the secret in its address; copy its fURL again",
    "introducer-as-server": "does not say that it stores shares; copy the fURL of a storage server",
    "down": "check that it runs",
    "future-https": "only storage protocol versions that are unknown here",
    "future-foolscap": "only storage protocol versions that are unknown here",
}
"""Entries that might be servers, until somebody asks them."""

ANNOUNCED = (
    "is skipped: its signature does not match its key",
    "is skipped: its key is of a version that is not known here",
    "is skipped: one of its anonymous-storage-NURLs cannot be used: the NURL is of a version",
    "introducer 'nurl' is skipped: that is a storage server's NURL",
    "introducer wrong-key at {good} is unreachable: the server there does not have its key",
    "introducer a-server at {server} is unreachable: it speaks another version",
    "introducer down at {down} is unreachable: no server listens there",
)
"""What is said of introducers, and of what they announce."""

NOWHERE = f"URI:CHK:{'a' * 26}:{'a' * 52}:2:3:200000"
"""A file that nobody has put anywhere."""


class FutureHttps(Resource):
    """A storage server of a version to come: it is there, and nothing is where it used to be."""

    isLeaf = True

    def render(self, request: Any) -> bytes:
        """Tell the version."""
        request.setHeader("content-type", "application/cbor")
        if request.path == b"/storage/v1/version":
            return cbor.dumps(FUTURE)
        request.setResponseCode(404)
        return b""


@implementer(RIStorageServer)  # type: ignore[misc]
class FutureFoolscap(Referenceable):  # type: ignore[misc]
    """The same over Foolscap."""

    def remote_get_version(self) -> dict[bytes, Any]:
        """Tell the version."""
        return FUTURE


class WrongInputTests(TestCase):
    """Three good servers, and everything wrong beside them."""

    timeout = 400

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.tahoe = TahoeGrid(self.root, 3)
        self.addCleanup(self.tahoe.stop)
        self.liar = RealIntroducer()
        self.tub = make_tub(LOST_AFTER_S, DIRECT_CONNECTIONS)
        self.tub.startService()
        self.addCleanup(self.tub.stopService)
        port = self.tub.listenOn("tcp:0:interface=127.0.0.1").getPortnum()
        self.tub.setLocation(f"tcp:127.0.0.1:{port}")
        who = identity.from_pem(identity.make_pem(), "future", "a test")
        listening = reactor.listenSSL(0, Site(FutureHttps()), who.contexts(), interface="127.0.0.1")
        self.addCleanup(listening.stopListening)
        self.future_nurl = str(who.nurl("127.0.0.1", listening.getHost().port))
        self.client = self.root / "client"

    def test_work_goes_on(self) -> Deferred[None]:
        """Files are put, fetched and checked, and everything wrong is told of in a sentence."""
        return Deferred.fromCoroutine(self._work_goes_on())

    async def _work_goes_on(self) -> None:
        furls = await deferToThread(self.tahoe.furls)
        nurls = await self.nurls()
        self.write_servers(furls, nurls)
        addresses = self.write_introducers(furls, nurls)
        sentences = [sentence.format(**addresses) for sentence in ANNOUNCED]
        sentences += [f"{name!r} {sentence}" for name, sentence in SKIPPED.items()]
        await self.pipegrid("init", "-k", "2", "--happy", "3", "-n", "3")

        status = await self.pipegrid("--json", "status")
        self.assert_told(status, *sentences)
        self.assert_status(status)
        data = Random(1).randbytes(200_000)
        cap = (await self.pipegrid("put", "-", data=data)).stdout.decode().strip()
        checked = json.loads((await self.pipegrid("--json", "check", "--verify", cap)).stdout)
        self.assertTrue(checked["healthy"])
        # Nobody is waited for once all of a file is found; of one that is nowhere everybody is asked.
        self.assertLessEqual(set(checked["unreachable"]), set(UNREACHABLE))
        nowhere = await self.pipegrid("--json", "check", NOWHERE, status=4)
        self.assertEqual(set(json.loads(nowhere.stdout)["unreachable"]), set(UNREACHABLE))
        self.assertEqual((await self.pipegrid("get", cap)).stdout, data)

        await deferToThread(self.tahoe.introducer.stop)
        status = await self.pipegrid("--json", "status")
        down = "no server listens there; the 3 servers that it named earlier are remembered"
        self.assert_told(status, f"introducer good at {addresses['good']} is unreachable: {down}")
        self.assert_status(status, **{"introducer-as-server": "is it running"})
        cap = (await self.pipegrid("put", "-", data=data[1:])).stdout.decode().strip()
        self.assertEqual((await self.pipegrid("get", cap)).stdout, data[1:])

    def test_init(self) -> Deferred[None]:
        """What is no introducer, or no server, is refused before anything is made."""
        return Deferred.fromCoroutine(self._init())

    async def _init(self) -> None:
        furls = await deferToThread(self.tahoe.furls)
        nurl = self.future_nurl
        told = await self.pipegrid("init", "--introducer", nurl, status=2)
        self.assert_told(told, "--introducer: that is a storage server's NURL")
        told = await self.pipegrid("init", "--introducer", "introducer.furl", status=2)
        self.assert_told(told, "--introducer: a fURL looks like pb://")
        servers = self.root / "servers.yaml"
        servers.write_text(json.dumps({"storage": {"x": {"ann": {NURLS: [furls["tahoe0"]]}}}}))
        told = await self.pipegrid("init", "--servers", str(servers), status=2)
        self.assert_told(told, "names no servers that can be used", "'x' is skipped", "a fURL")
        self.assertFalse(self.client.exists())

    async def nurls(self) -> dict[str, str]:
        """Return the good servers' NURLs by nickname, as the introducer tells them."""
        directory = self.root / "first"
        first = ("-d", str(directory))
        introducer = ("--introducer", self.tahoe.introducer_furl)
        await deferToThread(run_pipegrid, *first, "init", *introducer)
        for _ in range(20):  # servers may be about to announce themselves
            await deferToThread(run_pipegrid, *first, "status")
            known = read_cache(directory / "private" / cache_name("default"))
            if len(known) == len(self.tahoe.servers):
                break
        return {each.fields["nickname"]: each.fields[NURLS][0] for each in known}

    def write_servers(self, furls: dict[str, str], nurls: dict[str, str]) -> None:
        """Write ``servers.yaml``, in which everything is wrong."""
        nurl, furl = nurls["tahoe0"], furls["tahoe0"]
        future_furl = self.tub.registerReference(FutureFoolscap(), "future")
        entries: dict[str, dict[str, Any]] = {
            "furl-as-nurl": {NURLS: [furl]},
            "nurl-as-furl": {FURL: nurl},
            "future-nurl": {NURLS: [nurl.replace("#v=1", "#v=2")]},
            "wrong-key-nurl": {NURLS: [with_key_of(nurls["tahoe1"], nurl)]},
            "wrong-key-furl": {FURL: with_key_of(furls["tahoe1"], furl)},
            "wrong-secret-nurl": {NURLS: [f"{nurl.rpartition('/')[0]}/{'a' * 32}#v=1"]},
            "wrong-secret-furl": {FURL: f"{furl.rpartition('/')[0]}/{'a' * 32}"},
            "introducer-as-server": {FURL: self.tahoe.introducer_furl},
            "down": {NURLS: [with_key_of(nurl, f"@127.0.0.1:{free_port()}/x#v=1")]},
            "future-https": {NURLS: [self.future_nurl]},
            "future-foolscap": {FURL: future_furl},
        }
        self.assertEqual(set(entries), set(SKIPPED) | set(UNREACHABLE))
        storage = {name: {"ann": {"nickname": name, **ann}} for name, ann in entries.items()}
        path = self.client / SERVERS_NAME
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"storage": storage}))

    def write_introducers(self, furls: dict[str, str], nurls: dict[str, str]) -> dict[str, str]:
        """Write ``introducers.yaml``, in which one is good, and one a liar; returns where some are."""
        key, good, server = make_signing_key(), self.tahoe.introducer_furl, furls["tahoe2"]
        fields = {"service-name": "storage", "seqnum": 1, NURLS: [nurls["tahoe0"]]}
        message, signature, who = sign(fields, key)
        self.liar.known = [
            (message.replace(b'"seqnum": 1', b'"seqnum": 2'), signature, who),
            (message, signature, who.replace(b"v0-", b"v1-")),
            sign({**fields, NURLS: [nurls["tahoe0"].replace("#v=1", "#v=2")]}, key),
        ]
        down = f"127.0.0.1:{free_port()}"
        introducers = {
            "good": good,
            "liar": self.tub.registerReference(self.liar, "introducer"),
            # Foolscap makes one connection to a key: those of one client must not be the same.
            "down": f"pb://{'a' * 32}@tcp:{down}/introducer",
            "wrong-key": with_key_of(furls["tahoe1"], good),
            "a-server": server,
            "nurl": nurls["tahoe0"],
        }
        entries = {name: {"furl": furl} for name, furl in introducers.items()}
        (self.client / INTRODUCERS_NAME).write_text(json.dumps({"introducers": entries}))
        return {"good": address_of(good), "server": address_of(server), "down": down}

    async def pipegrid(
        self, *arguments: str, data: bytes = b"", status: int = 0
    ) -> CompletedProcess[bytes]:
        """Run a command on the client's directory."""
        command = ("-d", str(self.client), *arguments)
        done: CompletedProcess[bytes] = await deferToThread(run_pipegrid, *command, data=data)
        said = done.stderr.decode()
        self.assertEqual(done.returncode, status, f"{arguments}: {said}")
        self.assertNotIn("Traceback", said)
        return done

    def assert_told(self, done: CompletedProcess[bytes], *sentences: str) -> None:
        """A command has said all this, each on a line of its own."""
        lines = done.stderr.decode().splitlines()
        for sentence in sentences:
            self.assertTrue(any(sentence in line for line in lines), f"{sentence!r} in {lines}")

    def assert_status(self, done: CompletedProcess[bytes], **otherwise: str) -> None:
        """The good servers are there, and of the others is said why they are not."""
        found = {}
        for line in done.stdout.splitlines():
            server = json.loads(line)
            if "nickname" in server:
                found[server["nickname"]] = server["reason"]
        self.assertEqual(
            {name: found.pop(f"tahoe{name}") for name in range(3)}, dict.fromkeys(range(3))
        )
        self.assertEqual(set(found), set(UNREACHABLE))
        for name, sentence in (UNREACHABLE | otherwise).items():
            reason = found[name] or "it is there"
            self.assertIn(sentence, reason, f"{name}: {reason}")


def with_key_of(address: str, place: str) -> str:
    """Return an address with one's key and the other's place."""
    return f"{address.split('@')[0]}@{place.split('@')[1]}"


def address_of(furl: str) -> str:
    """Return the host and port in a fURL."""
    return furl.split("@tcp:")[1].split("/")[0]

"""Mirrors, and proxies before them, that mix up, drop or join the answers to pipelined requests."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import unquote, urlsplit

from misc.speedtest.mirror.authority import make_certificate
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import connection_scheduler
from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_connection import GATHERED_BYTES
from pipegrid.mirror.epoll_response_head import may_be
from pipegrid.mirror.fetch_run import MirrorRun
from pipegrid.mirror.file_scheduler import Scheduler
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.mirror_urls import parse_url
from tests.mirror.test_sprint import Server, SprintCase
from tests.mirror.world import MirrorWorld, ok

FILES = 24
SERIAL_S = FILES * (2 * 0.01 + 0.002) / 4
"""How long the simulated host takes for them on four connections, one request at a time."""

BATCH = 8
"""Requests that a server has before it answers the first of them, if they come at once."""

Mangle = Callable[[list[bytes]], list[bytes]]
"""Makes what is sent of the answers to several requests."""


def manglers(position: int) -> dict[str, Mangle]:
    """What goes wrong at one position of several answers."""

    def swapped(answers: list[bytes]) -> list[bytes]:
        other = (position + 1) % len(answers)
        answers[position], answers[other] = answers[other], answers[position]
        return answers

    def dropped(answers: list[bytes]) -> list[bytes]:
        return answers[:position] + answers[position + 1 :]

    def joined(answers: list[bytes]) -> list[bytes]:
        bodies = [each.partition(b"\r\n\r\n")[2] for each in answers[position : position + 2]]
        return [*answers[:position], ok(b"".join(bodies)), *answers[position + 2 :]]

    def first_only(answers: list[bytes]) -> list[bytes]:
        return answers[: position + 1]

    def doubled(answers: list[bytes]) -> list[bytes]:
        return answers[: position + 1] + answers[position:]

    def refused(answers: list[bytes]) -> list[bytes]:
        return [*answers[:position], ok(b"no", status=b"404 Not Found"), *answers[position + 1 :]]

    kinds: Sequence[Mangle] = (swapped, dropped, joined, first_only, doubled, refused)
    return {each.__name__: each for each in kinds}


class MixingProtocol(Protocol):
    """A connection that goes wrong when it has several requests at a time."""

    def __init__(self, answer: Callable[[str], bytes], mangle: Mangle, later: Any) -> None:
        self._answer = answer
        self._mangle = mangle
        self._later = later
        self._rest = b""
        self._paths: list[str] = []

    def dataReceived(self, data: bytes) -> None:
        *heads, self._rest = (self._rest + data).split(b"\r\n\r\n")
        if heads and not self._paths:
            self._later(0.002, self._send)
        self._paths += [head.split(b" ")[1].decode("ascii") for head in heads]

    def _send(self) -> None:
        while self._paths:
            paths, self._paths = self._paths[:BATCH], self._paths[BATCH:]
            answers = [self._answer(path) for path in paths]
            self.transport.write(  # type: ignore[union-attr]
                b"".join(self._mangle(answers) if len(answers) == BATCH else answers)
            )


class ReactorTests(SynchronousTestCase):
    """On a reactor, in virtual time."""

    def world(self, mangle: Mangle, hosts: int = 1) -> MirrorWorld:
        """Mirrors of which the first is so, with small files of one length and others."""
        files = {
            f"pool/f{number:02}": b"%02d" % number * (50 + number // 2) for number in range(FILES)
        }
        world = MirrorWorld(self.mktemp(), files, hosts)
        clock = world.network.host("m0").clock

        def answer(path: str) -> bytes:
            path = unquote(urlsplit(path).path).removeprefix("/archive/")
            world.hosts[0].requests[path] += 1
            body = world.files.get(path)
            return ok(b"", status=b"404 Not Found") if body is None else ok(body)

        factory = Factory.forProtocol(partial(MixingProtocol, answer, mangle, clock.callLater))
        world.network.host("m0").listen(81, factory)
        return world

    def redirecting(self, mangle: Mangle) -> MirrorWorld:
        """The same behind a host that redirects all to it, and mixes up its responses in the same way."""
        world = self.world(mangle, hosts=2)
        target = "http://m0/archive/"

        def answer(path: str) -> bytes:
            path = urlsplit(path).path.removeprefix("/archive/")
            return ok(b"", f"Location: {target}{path}".encode(), status=b"302 Found")

        clock = world.network.host("m1").clock
        factory = Factory.forProtocol(partial(MixingProtocol, answer, mangle, clock.callLater))
        world.network.host("m1").listen(81, factory)
        return world

    def sync(self, world: MirrorWorld, **options: Any) -> tuple[Any, float]:
        """Mirror from it; returns the report, and the seconds that it took."""
        original = world.network.endpoint
        mixing = ("m0", "m1") if options.get("mirrors") else ("m0",)

        def endpoint(client: str, host: str, port: int) -> Any:
            return original(client, host, 81 if host in mixing else port)

        self.patch(world.network, "endpoint", endpoint)
        began_s = world.clock.seconds()
        report = world.sync(**options)
        return report, report.elapsed_s or world.clock.seconds() - began_s

    def test_every_position(self) -> None:
        """Whatever goes wrong, and wherever: all files are right, at most 5 s later than one by one."""
        for environment in ({}, {"http_proxy": "http://m0:81/"}):
            for position in range(BATCH):
                for kind, mangle in manglers(position).items():
                    case = (kind, position, environment)
                    world = self.world(mangle)
                    report, took_s = self.sync(world, environment=environment)
                    self.assertEqual(report.failed, [], case)
                    self.assertEqual(world.found(), world.files, case)
                    self.assertLess(took_s, SERIAL_S + 5.0, case)

    def test_every_position_of_redirects(self) -> None:
        """So it is where a host redirects, and both it and the other one mix up what they answer."""
        for position in range(BATCH):
            for kind, mangle in manglers(position).items():
                world = self.redirecting(mangle)
                report, took_s = self.sync(world, mirrors=(1,))
                self.assertEqual(report.failed, [], (kind, position))
                self.assertEqual(world.found(), world.files, (kind, position))
                self.assertLess(took_s, 2 * SERIAL_S + 5.0, (kind, position))

    def test_remembered(self) -> None:
        """One stall, then nothing but single requests, also of what is mirrored next in the same run."""
        lost: list[int] = []

        def first_only(answers: list[bytes]) -> list[bytes]:
            lost.append(len(answers))
            return answers[:1]

        world = self.world(first_only)
        _, took_s = self.sync(world)
        self.assertEqual(world.found(), world.files)
        self.assertLess(took_s, SERIAL_S + 5.0)
        self.assertLessEqual(len(lost), 4)  # one a connection, at the same time

    def test_missing_for_good(self) -> None:
        """What a mirror lacks when it is asked alone has failed, and the mirror is pipelined as before."""
        world = self.world(lambda answers: answers)
        entries = world.entries()
        gone = list(world.files)[::6]
        world.files = {path: data for path, data in world.files.items() if path not in gone}
        report, _ = self.sync(world, entries=entries)
        self.assertEqual(sorted(path for path, _ in report.failed), gone)
        self.assertEqual(world.found(), world.files)

    def test_another_mirror(self) -> None:
        """Beside a good mirror all files come, too."""
        for position in range(0, BATCH, 3):
            for kind, mangle in manglers(position).items():
                world = self.world(mangle, hosts=2)
                report, took_s = self.sync(world)
                self.assertEqual((report.failed, world.found()), ([], world.files), kind)
                self.assertLess(took_s, SERIAL_S + 5.0, kind)


class MixingServer(Server):
    """
    A server that goes wrong when it has several requests at a time; on real sockets.

    Attributes:
        redirects_to: the URL of another one that has the files; "": it has them.
    """

    mangle: Mangle
    redirects_to = ""
    context: ssl.SSLContext | None = None

    def _serve(self, connection: Any) -> None:
        rest, paths = b"", list[str]()
        with connection:
            try:
                if self.context is not None:
                    connection = self.context.wrap_socket(connection, server_side=True)
                while True:
                    got = connection.recv(1 << 16)
                    if not got:
                        return
                    *heads, rest = (rest + got).split(b"\r\n\r\n")
                    paths = [head.split(b" ")[1].decode() for head in heads]
                    paths = [urlsplit(path).path.removeprefix("/") for path in paths]
                    while paths:
                        now, paths = paths[:BATCH], paths[BATCH:]
                        self.asked += now
                        answers = [self._response(path) for path in now]
                        mixed = self.mangle(answers) if len(now) == BATCH else answers
                        connection.sendall(b"".join(mixed))
            except OSError:
                return

    def _response(self, path: str) -> bytes:
        if not self.redirects_to:
            return ok(self.files[path])
        location = f"Location: {self.redirects_to}{path}".encode()
        return ok(b"", location, status=b"302 Found")


class SprintTests(SprintCase):
    """Without a reactor."""

    def setUp(self) -> None:
        super().setUp()
        self.files = {
            f"pool/f{number:02}": b"%02d" % number * (50 + number // 2)
            for number in range(4 * FILES)
        }

    def mixing(self, mangle: Mangle) -> MixingServer:
        """Start a server."""
        server = MixingServer(self.files)
        server.mangle = mangle
        self.addCleanup(server.close)
        return server

    def assert_all(self, case: tuple[str, int], server: MixingServer) -> None:
        """Fetch all; what is no HTTP any more is left to the other driver, and nothing wrong is stored."""
        self.dest = self.dest.with_name(f"{case[0]}{case[1]}{server.redirects_to[-6:-1]}")
        began_s = time.monotonic()
        work, done = self.run_on_epoll(server, connections=2)
        self.assertLess(time.monotonic() - began_s, 5.0, case)
        self.assertEqual(work.report.failed, [], case)
        if done:
            self.assertEqual(self.found(), self.files, case)
        else:
            self.assertEqual(case[0], "doubled")
            for path, data in self.found().items():
                self.assertEqual(data, self.files[path], case)
        server.close()

    def test_every_position(self) -> None:
        """The epoll driver fetches all, unless the responses are no HTTP any more."""
        self.patch(connection_scheduler, "PIPELINED_STALL_S", 0.3)
        for position in range(BATCH):
            for kind, mangle in manglers(position).items():
                self.assert_all((kind, position), self.mixing(mangle))

    def test_every_position_over_tls(self) -> None:
        """So it is over TLS."""
        self.patch(connection_scheduler, "PIPELINED_STALL_S", 0.3)
        made = make_certificate(Path(self.mktemp()))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.certificate, made.key)
        environment = mock.patch.dict(os.environ, SSL_CERT_FILE=str(made.authority))
        environment.start()
        self.addCleanup(environment.stop)
        for position in range(BATCH):
            for kind, mangle in manglers(position).items():
                server = self.mixing(mangle)
                server.context = context
                server.url = server.url.replace("http:", "https:")
                self.assert_all((kind, position), server)

    def test_every_position_of_redirects(self) -> None:
        """So it is where a host redirects to another one, and both mix up their responses."""
        self.patch(connection_scheduler, "PIPELINED_STALL_S", 0.3)
        for position in range(BATCH):
            for kind, mangle in manglers(position).items():
                target, server = self.mixing(mangle), self.mixing(mangle)
                server.redirects_to = target.url
                self.assert_all((kind, position), server)
                target.close()

    def test_long_files(self) -> None:
        """Files that are stored by the page are checked as well, and fetched again one by one."""
        length = GATHERED_BYTES + 1
        self.files = {f"f{number}": bytes([number]) * length for number in range(3 * BATCH)}
        server = self.mixing(lambda answers: [answers[1], answers[0], *answers[2:]])
        work, done = self.run_on_epoll(server, connections=1)
        self.assertEqual((done, self.found(), work.report.failed), (True, self.files, []))
        self.assertTrue(work.plan.is_serial(0))
        self.assertGreater(work.report.retries, 0)

    def test_remembered(self) -> None:
        """What is fetched next in the same run, into the same directory, is asked for one by one."""
        server = MixingServer(self.files)
        self.addCleanup(server.close)
        server.mangle = lambda answers: answers[::-1]
        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        address = parse_url(server.url)
        MirrorRun(destination, [address], VerifyPolicy()).plan.becomes_serial(0)
        self.assertTrue(MirrorRun(destination, [address], VerifyPolicy()).plan.is_serial(0))


class PlanTests(SynchronousTestCase):
    """What is decided."""

    def asked(self, plan: Scheduler, mirror: int = 0, company: bool = True) -> Any:
        """Return the next job of a mirror."""
        job = plan.next(mirror)
        assert job is not None
        if company:
            job.company |= 1 << mirror
        return job

    def test_right_when_alone(self) -> None:
        """Then the mirror is serial from now on."""
        plan = Scheduler(1)
        plan.add(ArchiveFile("a", 3, "sha256", b"x" * 32))
        job = self.asked(plan)
        self.assertFalse(plan.failed_at(job, 0, "wrong", "it has 4 bytes"))
        self.assertTrue(plan.is_serial(0))
        again = self.asked(plan, company=False)
        self.assertIs(again, job)
        plan.done(again, 0, 3)
        self.assertEqual((plan.is_serial(0), plan.serial_urls), (True, {"0"}))
        self.assertEqual((plan.failed, plan.retries, plan.is_idle), ([], 1, True))

    def test_wrong_when_alone(self) -> None:
        """Then it is the mirror's fault, and no reason not to pipeline."""
        plan = Scheduler(1)
        plan.add(ArchiveFile("a", 3, "sha256", b"x" * 32))
        for company in (True, False):
            job = self.asked(plan, company=company)
            self.assertEqual(plan.failed_at(job, 0, "wrong", "it has 4 bytes"), not company)
        self.assertFalse(plan.is_serial(0))
        self.assertEqual(plan.failed, [job])

    def test_refused_in_company(self) -> None:
        """Others are asked first; where none has it, each is asked again, alone."""
        plan = Scheduler(2)
        plan.add(ArchiveFile("a", 3, "sha256", b"x" * 32))
        for mirror in (0, 1):
            job = self.asked(plan, mirror)
            self.assertTrue(plan.failed_at(job, mirror, "refused", "it answers 404"))
        self.assertEqual((plan.is_serial(0), plan.is_serial(1)), (True, True))
        for mirror in (0, 1):
            self.assertIs(self.asked(plan, mirror, company=False), job)
            plan.failed_at(job, mirror, "refused", "it answers 404")
            plan._check_invariants()
        self.assertEqual((plan.failed, plan.is_idle), ([job], True))
        self.assertFalse(plan.is_serial(0) or plan.is_serial(1))

    def test_given_up_in_doubt(self) -> None:
        """What was doubted at a mirror that is given up, others are asked for."""
        plan = Scheduler(2)
        plan.add(ArchiveFile("a", 3, "sha256", b"x" * 32))
        job = self.asked(plan)
        plan.failed_at(job, 0, "wrong", "it has 4 bytes")
        plan.gave_up(0, "it is gone")
        self.assertIs(self.asked(plan, 1), job)
        plan.done(job, 1, 3)
        plan._check_invariants()
        self.assertEqual((plan.is_idle, plan.is_serial(1)), (True, False))


class SmallFileTests(SynchronousTestCase):
    """Release files, whose hash nobody knows."""

    def test_mixed_up(self) -> None:
        """What is not what its name says was perhaps the answer to another request."""
        message, signature = (
            b"-----BEGIN PGP SIGNED MESSAGE-----\n",
            b"-----BEGIN PGP SIGNATURE-----\n",
        )
        right = {
            "dists/sid/InRelease": (message,),
            "dists/sid/Release": (b"Origin: x\n", b""),
            "dists/sid/Release.gpg": (signature, b"\x89\x02"),
            "repodata/repomd.xml": (b"<repomd>",),
            "repodata/repomd.xml.asc": (signature,),
        }
        for path, datas in right.items():
            for data in datas:
                self.assertTrue(may_be(path, data), (path, data))
        for path in ("InRelease", "Release.gpg", "repomd.xml.asc"):
            self.assertFalse(may_be(path, b"Origin: x\n"))
            self.assertFalse(may_be("Release", right["dists/sid/InRelease"][0]))
        self.assertFalse(may_be("InRelease", signature))
        self.assertFalse(may_be("Release.gpg", message))

"""The server as a process has it: identity, port, lock, restart, end; one real connection over TLS."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import attrs
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from OpenSSL import SSL
from twisted.internet import reactor, ssl
from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol, wrapClientTLS
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Protocol
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.client import Agent, readBody
from zope.interface import implementer

from pipegrid.cli.error_report import sentence
from pipegrid.core import base32
from pipegrid.errors import UsageError
from pipegrid.server import announce, identity, serve
from pipegrid.server.serve import ServeSettings
from pipegrid.storage import lease_check_log, share_file
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.space_quota import read_note
from pipegrid.wire import gbs_cbor_bodies, server_address
from pipegrid.wire.storage_messages import LeaseSecrets
from tests import vectors
from tests.grid.introducer_support import FURL
from tests.mirror.unchanged import make_read_only
from tests.server.gbs.support import (
    SWISSNUM,
    VERSION,
    Reply,
    allocate,
    parse_replies,
    read,
    write,
)

LOOPBACK = "tcp:0:interface=127.0.0.1"


def locked(storage: Path, read_only: bool = False) -> int:
    """Take a storage directory; returns what to close."""
    lock = serve.lock_storage(storage, read_only)
    assert lock is not None
    return lock


class IdentityTests(SynchronousTestCase):
    """Key, certificate and secret."""

    def test_made_once(self) -> None:
        """They are made on the first start, for nobody else to read, and stay."""
        directory = Path(self.mktemp())
        first = identity.load_or_create(directory)
        key = directory / "private" / "node.pem"  # as if its process had been killed just then
        key.with_name(".node.pem.pipegrid-part").hardlink_to(key)
        self.assertEqual(identity.load_or_create(directory), first)
        for name in ("node.pem", "storage.swissnum"):
            mode = stat.S_IMODE((directory / "private" / name).stat().st_mode)
            self.assertEqual(mode & 0o077, 0)
        self.assertEqual(
            sorted(os.listdir(directory / "private")), ["node.pem", "storage.swissnum"]
        )
        self.assertEqual(len(first.swissnum), 32)
        self.assertNotIn(first.swissnum, repr(first))
        self.assertNotEqual(identity.load_or_create(Path(self.mktemp())).swissnum, first.swissnum)

    def test_a_recorded_servers_identity(self) -> None:
        """From a recorded certificate come the recorded NURL and tub id."""
        from cryptography import x509

        recorded = vectors.load("gbs-http")
        der = bytes.fromhex(recorded["certificate_der_hex"])
        certificate = x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)
        key = b"-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"
        furl = recorded["furl"]
        who = identity.from_pem(certificate + key, furl.rpartition("/")[2], "node.pem")
        self.assertEqual(str(who.nurl("127.0.0.1", 39472)), recorded["nurls"][0])
        self.assertEqual(base32.encode(who.tub_id), furl[5:37])

    def test_a_tahoe_nodes_directory(self) -> None:
        """The secret of a Tahoe-LAFS node's fURL is taken over, and nothing is added."""
        directory, who = self.make_tahoe_node()
        self.assertEqual(identity.load_or_create(directory), who)
        self.assertEqual(sorted(os.listdir(directory / "private")), ["node.pem", "storage.furl"])

    def make_tahoe_node(self) -> tuple[Path, identity.Identity]:
        """Return a directory with a key and a fURL, and who that is."""
        directory = Path(self.mktemp())
        (directory / "private").mkdir(parents=True)
        pem = identity.make_pem()
        who = identity.from_pem(pem, SWISSNUM, "node.pem")
        (directory / "private/node.pem").write_bytes(pem)
        furl = who.furl(["tcp:example.org:80"])
        (directory / "private/storage.furl").write_text(f"{furl}\n")
        return directory, who

    def test_a_directory_that_contradicts_itself(self) -> None:
        """A key, a fURL and a secret that are of different servers are refused, and stay as they are."""
        for name, content in (
            ("node.pem", None),
            ("node.pem", identity.make_pem()),
            ("storage.swissnum", b"another"),
            ("storage.furl", b"pb://"),
        ):
            directory, _ = self.make_tahoe_node()
            path = directory / "private" / name
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
            error = self.assertRaises(UsageError, identity.load_or_create, directory)
            self.assertIn(name, str(error))
            after = {each.name: each.read_bytes() for each in path.parent.iterdir()}
            self.assertEqual(after, before)

    def test_the_furl_is_kept(self) -> None:
        """Where clients find the server is written down for nobody else to read, when it changes."""
        directory, who = self.make_tahoe_node()
        path = directory / "private/storage.furl"
        before = path.stat()
        identity.keep_furl(directory, who.furl(["tcp:example.org:80"]))
        self.assertEqual(path.stat().st_ino, before.st_ino)
        moved = who.furl(["tcp:example.org:81"])
        identity.keep_furl(directory, moved)
        self.assertEqual(path.read_text(), f"{moved}\n")
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        self.assertEqual(identity.load_or_create(directory), who)
        self.assertEqual(sorted(os.listdir(path.parent)), ["node.pem", "storage.furl"])

    def test_the_furl_on_a_full_disk(self) -> None:
        """A server that has moved is served all the same, and says what is not written down."""
        wrong = [errno.ENOSPC]

        def full(path: Path, _: bytes) -> None:
            raise OSError(wrong[0], os.strerror(wrong[0]), str(path))

        directory, who = self.make_tahoe_node()
        path = directory / "private/storage.furl"
        before = path.read_text()
        self.patch(identity, "replace_file", full)
        moved = who.furl(["tcp:example.org:81"])
        for wrong[0] in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # as of shares
            with capturedLogs() as logged:
                identity.keep_furl(directory, moved)
            self.assertEqual(path.read_text(), before)
            self.assertIn("storage.furl still names", formatEvent(logged[0]))
        path.unlink()
        error = self.assertRaises(UsageError, identity.keep_furl, directory, moved)
        self.assertIn("free some space", str(error))

    def test_a_key_that_is_not_the_certificates(self) -> None:
        """Nothing is taken that would end a start, ask for a password, or fail each handshake."""
        pem, other = identity.make_pem(), identity.make_pem()
        begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
        key, certificate = pem[: pem.index(begin)], pem[pem.index(begin) :]
        whole = load_pem_private_key(key, None)
        password = BestAvailableEncryption(b"secret")
        for content, why in (
            (key[:300] + key[900:] + certificate, "damaged"),
            (key[:-200] + b"AAAA" + key[-196:] + certificate, "damaged"),
            (key + other[other.index(begin) :], "do not belong together"),
            (key + begin + b"\nAAAA\n" + end, "damaged"),
            (
                whole.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, password) + certificate,
                "encrypted",
            ),
        ):
            directory = Path(self.mktemp())
            (directory / "private").mkdir(parents=True)
            (directory / "private/node.pem").write_bytes(content)
            error = self.assertRaises(UsageError, identity.load_or_create, directory)
            self.assertIn(why, str(error))
            self.assertIn("node.pem", str(error))

    def test_damage(self) -> None:
        """Files that hold something else are named, not replaced."""
        for name in ("node.pem", "storage.swissnum"):
            directory = Path(self.mktemp())
            (directory / "private").mkdir(parents=True)
            path = directory / "private" / name
            path.write_text("a / b")
            error = self.assertRaises(UsageError, identity.load_or_create, directory)
            self.assertIn(name, str(error))
            self.assertEqual(path.read_text(), "a / b")
        error = self.assertRaises(UsageError, identity.load_or_create, Path("/dev/null/x"))
        self.assertIn("another directory with -d", sentence(error))


class SettingsTests(SynchronousTestCase):
    """Ports and places."""

    def test_ports(self) -> None:
        """A bare number is a TCP port."""
        self.assertEqual(serve.endpoint_text("80"), "tcp:80")
        self.assertEqual(serve.endpoint_text("80", "::1"), "tcp:80:interface=::1")
        self.assertEqual(serve.endpoint_text("unix:x"), "unix:x")
        self.assertEqual(serve.endpoint_text("\u0663"), "\u0663")  # a digit, elsewhere

    def test_no_port_at_all(self) -> None:
        """Of a socket in the file system no address can be made that leads there; port 0 was printed."""
        host = UNIXAddress("socket")
        error = self.assertRaises(UsageError, serve.where, None, host)
        self.assertIn("--location", str(error))
        self.assertEqual(serve.where("a.example:80", host), ("tcp:a.example:80",))

    def test_locations(self) -> None:
        """A location is a host and a port, IPv6 with or without brackets."""
        self.assertEqual(serve.where("example.org:80", None), ("tcp:example.org:80",))
        self.assertEqual(serve.where("[::1]:80", None), ("tcp:[::1]:80",))
        for wrong in ("example.org", ":80", "example.org:", "x:0", "x:65536", "x:y", "udp:x:1"):
            self.assertRaises(UsageError, serve.where, wrong, None)

    def test_several_locations(self) -> None:
        """A server may be in several places; those that HTTPS leads to have a NURL each."""
        hints = serve.where("tcp:a.example:80, tor:b.onion:81,i2p:c.i2p:82,d.example:83", None)
        expected = ("tcp:a.example:80", "tor:b.onion:81", "i2p:c.i2p:82", "tcp:d.example:83")
        self.assertEqual(hints, expected)
        who = identity.from_pem(identity.make_pem(), SWISSNUM, "node.pem")
        self.assertEqual(who.furl(hints).hints, expected)
        first, second, third = map(server_address.parse_nurl, who.nurls(hints))
        self.assertEqual((first.host, first.port, first.tor), ("a.example", 80, False))
        self.assertEqual((second.host, second.port, second.tor), ("b.onion", 81, True))
        self.assertEqual((third.host, third.port, third.tor), ("d.example", 83, False))
        self.assertRaises(UsageError, serve.where, "i2p:c.i2p:82", None)

    def test_one_server_a_directory(self) -> None:
        """Two servers never have one directory; the first one's end frees it. A new one is private."""
        storage = Path(self.mktemp())
        self.addCleanup(os.umask, os.umask(0))
        lock = locked(storage)
        self.assertEqual(stat.S_IMODE(storage.stat().st_mode), 0o700)
        self.assertRaises(UsageError, serve.lock_storage, storage)
        os.close(lock)
        storage.chmod(0o750)  # as its owner likes
        os.close(locked(storage))
        self.assertEqual(stat.S_IMODE(storage.stat().st_mode), 0o750)

    def test_a_lock_that_is_removed(self) -> None:
        """Who has just opened a file that is removed then makes another: it would be the lock of nobody."""
        storage = Path(self.mktemp())
        first = locked(storage)
        really = fcntl.flock

        def removing(fd: int, kind: int) -> None:
            self.patch(fcntl, "flock", really)
            (storage / "serve.lock").unlink()
            os.close(first)
            really(fd, kind)

        self.patch(fcntl, "flock", removing)
        lock = locked(storage)
        self.assertRaises(UsageError, serve.lock_storage, storage)
        os.close(lock)
        self.assertEqual((storage / "serve.lock").stat().st_mode & 0o777, 0o600)

    def test_a_disk_without_locks(self) -> None:
        """It is not taken for another server, which nobody could stop."""

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        self.patch(fcntl, "flock", refuse)
        error = self.assertRaises(UsageError, serve.lock_storage, Path(self.mktemp()))
        self.assertIn("serve.lock: No locks available", str(error))

    def test_a_directory_that_cannot_be_written_to(self) -> None:
        """Only who takes no shares can do without the lock; one that is not there is refused to all."""
        storage = Path(self.mktemp())
        storage.mkdir()
        for code in (errno.EROFS, errno.EACCES):
            make_read_only(self, code)
            error = self.assertRaises(UsageError, serve.lock_storage, storage)
            self.assertIn(os.strerror(code), str(error))
            self.assertIs(serve.lock_storage(storage, read_only=True), None)
            missing = storage / "not there"
            self.assertRaises(UsageError, serve.lock_storage, missing, read_only=True)
        self.assertEqual(list(storage.iterdir()), [])

    def test_who_takes_no_shares_is_alone_where_it_can_be(self) -> None:
        """Where it may write, it has the lock like any other."""
        storage = Path(self.mktemp())
        lock = locked(storage, read_only=True)
        self.assertRaises(UsageError, serve.lock_storage, storage, read_only=True)
        os.close(lock)


class NodeLockTests(SynchronousTestCase):
    """The lock of a server's key."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "private").mkdir(parents=True)
        self.key = self.directory / "private/node.pem"
        self.key.write_text("key")

    def test_a_key_that_cannot_be_written(self) -> None:
        """Or is a link to where secrets are: the second server is refused all the same."""
        really = os.open

        def protected(path: Any, flags: int, *more: Any, **others: Any) -> int:
            if str(path).endswith("node.pem") and flags & os.O_RDWR:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
            return really(path, flags, *more, **others)

        secrets = Path(self.mktemp())
        secrets.mkdir()
        os.rename(self.key, secrets / "node.pem")
        self.key.symlink_to(secrets.absolute() / "node.pem")
        self.patch(os, "open", protected)
        lock = serve.lock_node(self.directory)
        assert lock is not None
        error = self.assertRaises(UsageError, serve.lock_node, self.directory)
        self.assertIn("another server runs in", str(error))
        os.close(lock)

    def test_a_disk_without_locks(self) -> None:
        """It serves, as before there was this lock, and says what nobody prevents."""

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        self.patch(fcntl, "flock", refuse)
        with capturedLogs() as logged:
            self.assertIs(serve.lock_node(self.directory), None)
        self.assertIn("make sure that no second server", formatEvent(logged[0]))


class Client(Protocol):
    """Sends requests, gathers answers until there are so many, or the connection ends."""

    def __init__(self) -> None:
        self.data = b""
        self.spki_hash = b""
        self.wanted = 0
        self.done: Deferred[list[Reply]] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def ask(self, *requests: bytes) -> Deferred[list[Reply]]:
        """Send them all at once."""
        self.wanted = len(requests)
        assert self.transport is not None
        self.transport.write(b"".join(requests))
        return self.done

    def dataReceived(self, data: bytes) -> None:
        if not self.spki_hash:
            transport: Any = self.transport
            key = transport.getPeerCertificate().to_cryptography().public_key()
            spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            self.spki_hash = hashlib.sha256(spki).digest()
        self.data += data
        replies = parse_replies(self.data)
        if len(replies) == self.wanted:
            self.done.callback(replies)

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        self.lost.callback(None)


@implementer(IOpenSSLClientConnectionCreator)
@attrs.define
class _Contexts:
    """Makes TLS connections that ask for no server's name."""

    options: Any
    protocols: list[bytes]

    def clientConnectionForTLS(self, protocol: Any) -> Any:
        """Return one."""
        connection = SSL.Connection(self.options.getContext(), None)
        if self.protocols:
            connection.set_alpn_protos(self.protocols)
        return connection


async def connect(
    address: server_address.Nurl, protocols: list[bytes] | None = None, **options: Any
) -> Client:
    """Connect as real clients do: TLS, whatever the certificate's names and dates."""
    contexts = ssl.CertificateOptions(verify=False, **options)

    tcp = TCP4ClientEndpoint(reactor, address.host, address.port)
    endpoint: Any = wrapClientTLS(_Contexts(contexts, protocols or []), tcp)
    client: Client = await connectProtocol(endpoint, Client())
    return client


class LoopbackTests(TestCase):
    """A node that listens."""

    timeout = 30

    def settings(self, **options: Any) -> ServeSettings:
        """Return settings for this test's directory."""
        return ServeSettings(directory=self.directory, port=LOOPBACK, **options)

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        (self.directory / "private").mkdir(parents=True)
        (self.directory / "private/storage.swissnum").write_text(SWISSNUM)

    async def start(self, **options: Any) -> serve.StorageNode:
        """Start a node that does not outlive the test."""
        node = await serve.start(reactor, self.settings(**options))
        self.addCleanup(node.stop)
        return node

    def test_over_tls(self) -> Deferred[None]:
        """Store and fetch over TLS, with the certificate that the NURL names; then restart and resume."""
        return Deferred.fromCoroutine(self._test_over_tls())

    async def _test_over_tls(self) -> None:
        node = await self.start(metrics="0")
        address = server_address.parse_nurl(node.nurl)
        data = os.urandom(300_000)
        client = await connect(address)
        requests = (allocate({0, 1}, len(data)), write(0, 0, data), read(0), write(1, 0, data[:9]))
        replies = await client.ask(*requests)
        self.assertEqual([reply.status for reply in replies], [200, 201, 200, 200])
        self.assertEqual(replies[2].body, data)
        self.assertTrue(address.recognises(client.spki_hash))
        await self._check_metrics(node)
        await node.stop()
        await client.lost

        again = await self.start()
        second = server_address.parse_nurl(again.nurl)
        self.assertEqual((second.spki_hash, second.swissnum), (address.spki_hash, SWISSNUM))
        client = await connect(second)
        replies = await client.ask(read(0, 0, 10), write(1, 9, data[9:]), read(1, 5, 15))
        self.assertEqual([reply.status for reply in replies], [206, 201, 206])
        self.assertEqual(replies[2].body, data[5:15])
        await again.stop()

    async def _check_metrics(self, node: serve.StorageNode) -> None:
        port = node.metrics_port
        response = await Agent(reactor).request(b"GET", f"http://127.0.0.1:{port}/metrics".encode())
        text = (await readBody(response)).decode()
        self.assertIn('pipegrid_answers_total{operation="write",status="201"} 1.0', text)
        self.assertIn("pipegrid_received_bytes_total 300009.0", text)
        self.assertIn("pipegrid_unfinished_uploads 1.0", text)

    def test_a_quota(self) -> Deferred[None]:
        """It is shown in the metrics, kept over restarts, and a server without one forgets the number."""
        return Deferred.fromCoroutine(self._test_quota())

    async def _test_quota(self) -> None:
        node = await self.start(metrics="0", quota_bytes=400_000)
        data = os.urandom(300_000)
        client = await connect(server_address.parse_nurl(node.nurl))
        requests = (allocate({0}, len(data)), write(0, 0, data), allocate({1}, len(data)))
        replies = await client.ask(*requests)
        self.assertEqual([reply.status for reply in replies], [200, 201, 200])
        where = f"http://127.0.0.1:{node.metrics_port}/metrics".encode()
        text = (await readBody(await Agent(reactor).request(b"GET", where))).decode()
        self.assertIn("pipegrid_quota_bytes 400000.0", text)
        self.assertIn("pipegrid_used_bytes 300084.0", text)
        self.assertIn("pipegrid_allocated_bytes 0.0", text)
        self.assertIn("pipegrid_available_bytes 99832.0", text)
        await node.stop()
        note = read_note(node.storage)
        assert note is not None
        self.assertEqual((note.bytes, note.exact), (300_084, True))

        again = await self.start(quota_bytes=100_000)
        client = await connect(server_address.parse_nurl(again.nurl))
        replies = await client.ask(read(0), VERSION, allocate({0}, 1, si=bytes(16)))
        self.assertEqual(replies[0].body, data)
        self.assertEqual(replies[2].status, 507)
        await again.stop()
        with capturedLogs() as events:
            third = await self.start()
        self.assertIn("there is no quota now; it was 100 kB", map(formatEvent, events))
        self.assertIsNone(read_note(third.storage))
        await third.stop()

    def test_refusals(self) -> Deferred[None]:
        """A second server, a port that is taken, and nonsense are refused with a sentence."""
        return Deferred.fromCoroutine(self._test_refusals())

    def test_read_only_from_a_disk_that_is(self) -> Deferred[None]:
        """It serves what is there, refuses what is new, and does nothing that is for one server alone."""
        return Deferred.fromCoroutine(self._test_read_only())

    async def _test_read_only(self) -> None:
        data = os.urandom(3000)
        node = await self.start()
        client = await connect(server_address.parse_nurl(node.nurl))
        requests = (allocate({0, 1}, len(data)), write(0, 0, data), read(0), write(1, 0, data[:9]))
        await client.ask(*requests)
        location = f"127.0.0.1:{server_address.parse_nurl(node.nurl).port}"
        await node.stop()
        (node.storage / "serve.lock").unlink()
        before = sorted(node.storage.rglob("*"))
        make_read_only(self, errno.EROFS)
        for name in ("adopt_leftovers", "expire_uploads", "collect_garbage"):
            self.patch(ShareStore, name, None)  # not to be called

        again = await self.start(read_only=True, expiry=Expiry(), location=location)
        port = again._ports[0].getHost().port
        client = await connect(attrs.evolve(server_address.parse_nurl(again.nurl), port=port))
        replies = await client.ask(read(0), allocate({0, 1, 2}, len(data)), read(0, 5, 9), VERSION)
        self.assertEqual([reply.status for reply in replies], [200, 200, 206, 200])
        self.assertEqual(replies[0].body, data)
        told = gbs_cbor_bodies.unpack_allocation(replies[1].body)
        self.assertEqual((told.already_have, told.allocated), ({0}, frozenset()))
        await again.stop()
        self.assertEqual(sorted(node.storage.rglob("*")), before)

    async def _test_refusals(self) -> None:
        node = await self.start()
        port = server_address.parse_nurl(node.nurl).port
        other = ServeSettings(directory=Path(self.mktemp()), port=f"tcp:{port}:interface=127.0.0.1")
        for settings in (
            self.settings(),
            other,
            attrs.evolve(other, port="nonsense:1"),
            attrs.evolve(other, port="tcp:x"),
            attrs.evolve(other, port=LOOPBACK, location="nowhere"),
        ):
            with self.assertRaises(UsageError):
                await serve.start(reactor, settings)
        await node.stop()

    def test_leases_that_have_run_out(self) -> Deferred[None]:
        """A server that is to remove shares looks at once, and waits until its clock has proved itself."""
        return Deferred.fromCoroutine(self._test_leases())

    async def _test_leases(self) -> None:
        storage = self.directory / "storage"
        path = storage / "shares" / "aa" / ("a" * 26) / "0"
        path.parent.mkdir(parents=True)
        lease = share_file.make_lease(1, 0, LeaseSecrets(b"r" * 32, b"c" * 32), 1.0)
        share = b"share".join((share_file.pack_header(5, 1), lease.pack()))
        path.write_bytes(share)
        now = time.time()
        for since_s, remains in ((None, True), (now - 6 * 86400, True), (now - 8 * 86400, False)):
            note = storage / lease_check_log.NOTE_NAME
            if since_s is not None:
                note.write_text(f'{{"since_s": {since_s}, "last_s": {now - 60}}}')
            node = await self.start(expiry=Expiry())
            await node._collector.run(int)  # which comes after what is done at the start
            await node.stop()
            self.assertEqual(path.exists(), remains)
            self.assertGreaterEqual(json.loads(note.read_bytes())["last_s"], now)

    def test_a_directory_with_a_key_alone(self) -> Deferred[None]:
        """A server that nothing else can be written for is served as before there were introducers there."""
        return Deferred.fromCoroutine(self._test_a_key_alone())

    async def _test_a_key_alone(self) -> None:
        before = await self.start()
        await before.stop()

        def full(path: Path, *_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        self.patch(announce, "replace_file", full)
        self.patch(identity, "replace_file", full)
        location = before.nurl.partition("@")[2].partition("/")[0]
        with capturedLogs() as logged:
            node = await self.start(introduces=True, location=location)
            await node.stop()
        said = [formatEvent(event) for event in logged]
        self.assertEqual(len([each for each in said if "are not introduced to members" in each]), 2)
        furl = self.directory / "private/members.furl"
        furl.write_text("damaged")
        with capturedLogs() as logged:
            node = await self.start(introduces=True, location=location)
            await node.stop()
        self.assertIn("members.furl", "".join(formatEvent(event) for event in logged))
        self.assertEqual(furl.read_text(), "damaged")
        with self.assertRaises(UsageError):  # for an introducer that was asked for
            await self.start(introducers={"a": FURL}, location=location)

    def test_old_tls_is_refused(self) -> Deferred[None]:
        """TLS 1.1 is; HTTP/1.1 is what ALPN agrees on."""
        return Deferred.fromCoroutine(self._test_old_tls())

    async def _test_old_tls(self) -> None:
        node = await self.start()
        address = server_address.parse_nurl(node.nurl)
        client = await connect(address, [b"h2", b"http/1.1"])
        (reply,) = await client.ask(VERSION)
        self.assertEqual(reply.status, 200)
        transport: Any = client.transport
        self.assertEqual(transport.negotiatedProtocol, b"http/1.1")
        transport.loseConnection()
        await client.lost
        old = await connect(
            address,
            insecurelyLowerMinimumTo=ssl.TLSVersion.TLSv1_0,
            lowerMaximumSecurityTo=ssl.TLSVersion.TLSv1_1,
        )
        old.ask(VERSION)
        await old.lost
        self.assertEqual(old.data, b"")
        await node.stop()

    def test_serving_until_cancelled(self) -> Deferred[None]:
        """``serve`` announces the node, and ends in good order when it is cancelled."""
        return Deferred.fromCoroutine(self._test_cancelled())

    async def _test_cancelled(self) -> None:
        listening: Deferred[serve.StorageNode] = Deferred()
        serving = Deferred.fromCoroutine(serve.serve(reactor, self.settings(), listening.callback))
        node = await listening
        client = await connect(server_address.parse_nurl(node.nurl))
        await client.ask(VERSION)
        serving.cancel()
        await serving
        await client.lost
        os.close(locked(node.storage))

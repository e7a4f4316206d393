"""restic's REST protocol over HTTP, on an embedded grid: what is answered to which request."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import attrs
import bcrypt
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS, FileBodyProducer, readBody
from twisted.web.http_headers import Headers
from twisted.web.resource import Resource

from pipegrid import Grid, create_local
from pipegrid.core.mutable import keys
from pipegrid.errors import UsageError
from pipegrid.gateway.gateway_settings import GatewaySettings, ResticSettings
from pipegrid.gateway.http_site import GatewaySite
from pipegrid.gateway.restic.password_file import parse_users
from pipegrid.gateway.restic.repository_paths import V1_TYPE, V2_TYPE
from pipegrid.gateway.restic.restic_resource import ResticResource
from tests.gateway.test_restic_repository import SpareKeys, object_of

reactor: Any = installed_reactor


@attrs.frozen
class Answer:
    """A response."""

    code: int
    body: bytes
    headers: Headers

    def header(self, name: str) -> str:
        """Return a header's value; empty if there is none."""
        return (self.headers.getRawHeaders(name) or [""])[0]


class ResourceTestCase(TestCase):
    """A gateway with a grid of its own, and a client."""

    restic = ResticSettings(no_auth=True)
    timeout = 100

    async def setUp(self) -> None:  # type: ignore[override]
        self.patch(keys, "generate", SpareKeys().generate)
        self.directory = Path(self.mktemp())
        create_local(self.directory, durability="none")
        await self.start()

    async def start(self) -> None:
        """Start the gateway."""
        self.grid = await Grid.open(reactor, self.directory)
        self.settings = GatewaySettings(self.directory, restic=self.restic)
        root = Resource()
        root.putChild(b"restic", ResticResource(self.grid, self.settings))
        self.site = GatewaySite(root, self.settings, reactor)
        self.port = reactor.listenTCP(0, self.site, interface="127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port.getHost().port}"

    async def stop(self) -> None:
        """Stop it."""
        self.site.close_all()
        await self.port.stopListening()
        await deferLater(reactor, 0)
        await self.grid.close()

    def tearDown(self) -> Deferred[None]:  # type: ignore[override]
        return ensureDeferred(self.stop())

    async def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> Answer:
        """Make a request."""
        agent = Agent(reactor, BrowserLikePolicyForHTTPS())
        given = Headers({name.replace("_", "-"): [value] for name, value in headers.items()})
        producer = None if body is None else FileBodyProducer(_reader(body))
        url = f"{self.url}/restic/{path}".encode()
        response: Any = await agent.request(method.encode(), url, given, producer)
        data = await readBody(response) if method != "HEAD" else b""
        return Answer(response.code, data, response.headers)

    async def expect(self, code: int, method: str, path: str, *args: Any, **options: Any) -> Answer:
        """Make a request that has this status."""
        answer = await self.ask(method, path, *args, **options)
        self.assertEqual(answer.code, code, (method, path, answer.body[:200]))
        if code >= 400 and method != "HEAD":
            self.assertEqual(answer.body.strip().count(b"\n"), 0, "one sentence")
            self.assertTrue(answer.body.strip())
        return answer

    async def store(self, kind: str, data: bytes, code: int = 200) -> str:
        """Store an object in the repository ``r``; returns its id."""
        await self.expect(code, "POST", f"r/{kind}/{object_of(data)}", data)
        return object_of(data)


def _reader(body: bytes) -> Any:
    import io

    return io.BytesIO(body)


class ProtocolTests(ResourceTestCase):
    """Versions 1 and 2."""

    async def test_life(self) -> None:
        """A repository is made, objects are stored, listed, read, and removed."""
        await self.expect(404, "HEAD", "r/config")
        await self.expect(200, "POST", "r/?create=true", b"")
        await self.expect(200, "POST", "r/?create=true", b"")
        await self.expect(404, "HEAD", "r/config")
        await self.expect(200, "POST", "r/config", b"c" * 155)
        found = await self.expect(200, "HEAD", "r/config")
        self.assertEqual(found.header("content-length"), "155")
        await self.expect(403, "POST", "r/config", b"d" * 155)
        data = bytes(range(256)) * 1000
        name = await self.store("data", data)
        small = await self.store("data", b"small")
        found = await self.expect(200, "GET", f"r/data/{name}")
        self.assertEqual(found.body, data)
        for header, part in (
            ("bytes=0-", data),
            ("bytes=100-199", data[100:200]),
            ("bytes=255999-", data[255999:]),
            ("bytes=-7", data[-7:]),
            ("bytes=255000-999999999", data[255000:]),
        ):
            found = await self.expect(206, "GET", f"r/data/{name}", range=header)
            self.assertEqual(found.body, part, header)
        self.assertTrue(found.header("content-range").endswith("/256000"))
        await self.expect(416, "GET", f"r/data/{name}", range="bytes=256000-")
        found = await self.expect(206, "GET", f"r/data/{small}", range="bytes=1-2")
        self.assertEqual(found.body, b"ma")
        for accept, kind in ((V2_TYPE, V2_TYPE), (V1_TYPE, V1_TYPE), ("*/*", V1_TYPE)):
            found = await self.expect(200, "GET", "r/data/", accept=accept)
            self.assertEqual(found.header("content-type"), kind)
            listed = json.loads(found.body)
            if kind == V2_TYPE:
                listed = {each["name"]: each["size"] for each in listed}
                self.assertEqual(listed, {name: 256000, small: 5})
            else:
                self.assertEqual(sorted(listed), sorted([name, small]))
        self.assertEqual((await self.expect(200, "GET", "r/locks/")).body, b"[]")
        await self.expect(200, "DELETE", f"r/data/{name}")
        await self.expect(200, "DELETE", f"r/data/{name}")
        await self.expect(404, "GET", f"r/data/{name}")
        await self.expect(404, "HEAD", f"r/data/{name}")
        await self.expect(200, "DELETE", "r/config")
        await self.expect(404, "GET", "r/config")

    async def test_another_start(self) -> None:
        """All is there when the gateway starts again; the alias names it for other commands."""
        await self.expect(200, "POST", "r/?create=true", b"")
        name = await self.store("data", b"d" * 1000)
        await self.stop()
        await self.start()
        found = await self.expect(200, "GET", f"r/data/{name}")
        self.assertEqual(found.body, b"d" * 1000)
        end = await self.grid.tree.resolve(f"restic:r/data/{name[:2]}/{name}")
        self.assertEqual(await self.grid.read(end.cap), b"d" * 1000)  # type: ignore[arg-type]

    async def test_wrong_bodies(self) -> None:
        """A body that is not what its name says is refused, and nothing is stored."""
        await self.expect(200, "POST", "r/?create=true", b"")
        for kind in ("data", "index", "keys", "snapshots", "locks"):
            await self.expect(400, "POST", f"r/{kind}/{object_of(b'a')}", b"b")
            found = await self.expect(200, "GET", f"r/{kind}/")
            self.assertEqual(found.body, b"[]")

    async def test_wrong_paths(self) -> None:
        """Paths that are none of the protocol's lead nowhere; methods that make no sense say which do."""
        await self.expect(200, "POST", "r/?create=true", b"")
        name = object_of(b"x")
        for path in (
            "r/data/xyz",
            f"r/data/{name.upper()}",
            f"r/data/{name}/",
            f"r/other/{name}",
            "r/data/..%2f..%2fconfig",
            "r/../r/config",
            "..%2fr/config",
            "%2e%2e/config",
            "r//config",
            "a/b/c/config",
            "config",
            "",
            "%00/config",
            "%ff/config",
            "r/data/" + "a" * 3000,
        ):
            await self.expect(404, "GET", path)
            await self.expect(404, "POST", path, b"x")
            await self.expect(404, "DELETE", path)
        found = await self.expect(405, "PUT", f"r/data/{name}", b"x")
        self.assertEqual(found.header("allow"), "HEAD, GET, POST, DELETE")
        await self.expect(405, "POST", "r/data/", b"x")
        await self.expect(405, "GET", "r/")
        await self.expect(400, "POST", "r/", b"")
        await self.expect(501, "DELETE", "r/")

    async def test_no_repository(self) -> None:
        """Without a repository nothing is stored."""
        for round_ in range(2):
            await self.store("data", b"x" * 100, 404)
            await self.expect(404, "GET", f"r/data/{object_of(b'x')}")
            await self.expect(404, "GET", "r/data/")
            await self.expect(404, "DELETE", f"r/data/{object_of(b'x')}")
            if not round_:
                await self.expect(200, "POST", "other/?create=true", b"")

    async def test_large(self) -> None:
        """A body that is too large for memory goes through a file, which leaves nothing behind."""
        await self.expect(200, "POST", "r/?create=true", b"")
        data = hashlib.shake_256(b"seed").digest(9 << 20)
        name = await self.store("data", data)
        self.assertEqual((await self.expect(200, "GET", f"r/data/{name}")).body, data)
        self.assertEqual(self.site.space.used_bytes, 0)
        self.assertEqual(list(self.settings.temporary.iterdir()), [])

    async def test_large_downloads_take_turns(self) -> None:
        """With all others, so that clients that stop reading hold a bounded amount; small ones run."""
        await self.expect(200, "POST", "r/?create=true", b"")
        data, small = hashlib.shake_256(b"seed").digest(1 << 20), b"s" * 100_000
        name, small_name = [await self.store("data", each) for each in (data, small)]
        turns = self.site.downloads
        taken = turns.tokens
        for _ in range(taken):
            await turns.acquire()
        large: Deferred[Answer] = ensureDeferred(self.ask("GET", f"r/data/{name}"))
        while not (turns.waiting or large.called):
            await deferLater(reactor, 0.01)
        self.assertEqual((len(turns.waiting), large.called), (1, False))
        self.assertEqual((await self.expect(200, "GET", f"r/data/{small_name}")).body, small)
        self.assertFalse(large.called)
        for _ in range(taken):
            turns.release()
        self.assertEqual((await large).body, data)
        self.assertEqual(turns.tokens, taken)

    async def test_too_large(self) -> None:
        """An object that is larger than any of restic's is refused before it arrives."""
        host = self.port.getHost()
        with socket.create_connection((host.host, host.port)) as client:
            head = f"POST /restic/r/data/{'0' * 64} HTTP/1.1\r\nHost: localhost\r\n"
            client.sendall(f"{head}Content-Length: {2 << 30}\r\n\r\n".encode() + b"x" * 100_000)
            await deferLater(reactor, 0.1)
            self.assertEqual(self.site.space.used_bytes, 0)

    async def test_truncated(self) -> None:
        """A client that disconnects in the middle of a body has stored nothing."""
        await self.expect(200, "POST", "r/?create=true", b"")
        data = b"t" * 200_000
        host = self.port.getHost()
        with socket.create_connection((host.host, host.port)) as client:
            head = f"POST /restic/r/data/{object_of(data)} HTTP/1.1\r\nHost: localhost\r\n"
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:-1])
            await deferLater(reactor, 0.1)
        await deferLater(reactor, 0.1)
        self.assertEqual((await self.expect(200, "GET", "r/data/")).body, b"[]")
        self.assertEqual(self.site.space.used_bytes, 0)


class AppendOnlyTests(ResourceTestCase):
    """``--append-only``."""

    restic = ResticSettings(append_only=True, no_auth=True)

    async def test_append_only(self) -> None:
        """Locks are removed, nothing else is, nor is anything replaced."""
        await self.expect(200, "POST", "r/?create=true", b"")
        await self.expect(200, "POST", "r/config", b"c" * 155)
        await self.expect(403, "POST", "r/config", b"d" * 155)
        await self.expect(403, "DELETE", "r/config")
        for kind in ("data", "index", "keys", "snapshots"):
            name = await self.store(kind, kind.encode() * 50)
            await self.expect(403, "DELETE", f"r/{kind}/{name}")
            await self.store(kind, kind.encode() * 50)  # a repeated request
            await self.expect(200, "GET", f"r/{kind}/{name}")
        lock = await self.store("locks", b"lock" * 30)
        await self.expect(200, "DELETE", f"r/locks/{lock}")
        await self.expect(404, "GET", f"r/locks/{lock}")


def basic(user: str, password: str) -> str:
    """Return a header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class PasswordTests(ResourceTestCase):
    """Basic authentication, and repositories of users."""

    async def setUp(self) -> None:  # type: ignore[override]
        self.directory = Path(self.mktemp())
        create_local(self.directory, durability="none")
        self.patch(keys, "generate", SpareKeys().generate)
        self.file = self.directory / "private" / ".htpasswd"
        self.write("ann", "bob")
        self.restic = ResticSettings(self.file, private_repositories=True)
        await self.start()

    def write(self, *users: str) -> None:
        """Write the password file; a password is the name, twice."""
        hashed = {user: bcrypt.hashpw(user.encode() * 2, bcrypt.gensalt(4)) for user in users}
        lines = [f"{user}:{value.decode()}\n" for user, value in hashed.items()]
        sha = base64.b64encode(hashlib.sha1(b"sha1").digest()).decode()
        self.file.write_text("# users\n" + "".join(lines) + f"sha:{{SHA}}{sha}\n")

    async def test_passwords(self) -> None:
        """Only the right password is let in; each user has repositories below the own name."""
        found = await self.expect(401, "HEAD", "ann/config")
        self.assertIn("Basic", found.header("www-authenticate"))
        for wrong in (
            basic("ann", "bobbob"),
            basic("eve", "eveeve"),
            basic("ann", ""),
            basic("", ""),
            "Basic !!!",
            "Basic " + "A" * 5000,
            "Bearer x",
            "Basic " + base64.b64encode(b"annann").decode(),
        ):
            await self.expect(401, "POST", "ann/?create=true", b"", authorization=wrong)
        ann, bob = basic("ann", "annann"), basic("bob", "bobbob")
        for path in ("ann/", "ann/second/"):
            await self.expect(200, "POST", f"{path}?create=true", b"", authorization=ann)
            await self.expect(200, "POST", f"{path}config", b"c" * 99, authorization=ann)
            await self.expect(401, "GET", f"{path}config", authorization=bob)
            await self.expect(401, "POST", f"{path}?create=true", b"", authorization=bob)
        sha = basic("sha", "sha1")
        await self.expect(200, "POST", "sha/?create=true", b"", authorization=sha)

    async def test_large_bodies(self) -> None:
        """A large body of a client without the right password takes no space, from its beginning on."""
        host = self.port.getHost()
        for header, waits_s in (("", 0.1), (basic("eve", "x"), 0.1), (basic("ann", "x"), 0.5)):
            with socket.create_connection((host.host, host.port)) as client:
                client.sendall(
                    f"POST /restic/ann/data/{'0' * 64} HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: {header}\r\nContent-Length: 2000000\r\n\r\n".encode()
                )
                await deferLater(reactor, waits_s)
                client.sendall(b"x" * 500_000)
                await deferLater(reactor, 0.1)
                self.assertEqual(self.site.space.used_bytes, 0, header)
                client.sendall(b"x" * 1_500_000)
                await deferLater(reactor, 0.2)
                client.settimeout(10)
                self.assertIn(b" 401 ", client.recv(1000))

    async def test_changed(self) -> None:
        """The file is read again when it has changed; a user who is gone is not let in any more."""
        ann = basic("ann", "annann")
        await self.expect(404, "HEAD", "ann/config", authorization=ann)
        self.write("bob")
        await deferLater(reactor, 1.1)
        await self.expect(401, "HEAD", "ann/config", authorization=ann)
        await self.expect(404, "HEAD", "bob/config", authorization=basic("bob", "bobbob"))
        self.file.unlink()
        await deferLater(reactor, 1.1)
        await self.expect(401, "HEAD", "bob/config", authorization=basic("bob", "bobbob"))

    async def test_other_hashes(self) -> None:
        """Users whose hashes are of unknown kinds, malformed or too costly are not let in; others are."""
        known = self.file.read_text()
        odd = {
            "plain": "plain",
            "md5": "$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/",
            "crypt": "$6$salt$" + "a" * 86,
            "ssha": "{SSHA}" + "A" * 40,
            "none": "",
            "bad": "$2y$05$short",
            "odd": "$2y$05$" + "!" * 53,
            "sha1": "{SHA}not base64",
            "slow": "$2y$31$" + "a" * 53,
        }
        lines = "".join(f"{user}:{stored}\n" for user, stored in odd.items())
        hashes, problems = parse_users(lines)
        self.assertEqual(set(hashes), {"bad", "odd", "sha1"})
        self.assertEqual(len(problems), len(odd) - 3)
        self.assertNotIn("$apr1$", str(problems))
        self.file.write_text(known + lines)
        await deferLater(reactor, 1.1)
        for user, stored in odd.items():
            for password in (user, stored, ""):
                await self.expect(
                    401, "HEAD", f"{user}/config", authorization=basic(user, password)
                )
        await self.expect(404, "HEAD", "ann/config", authorization=basic("ann", "annann"))

    async def test_missing(self) -> None:
        """Users have no repositories of their own without passwords."""
        self.file.unlink()
        for no_auth in (False, True):
            restic = attrs.evolve(self.restic, no_auth=no_auth)
            with self.assertRaises(UsageError):
                ResticResource(self.grid, attrs.evolve(self.settings, restic=restic))


class NoPasswordFileTests(ResourceTestCase):
    """Other users of the machine reach the gateway's port, too: without passwords nobody has access."""

    async def setUp(self) -> None:  # type: ignore[override]
        self.file = Path(self.mktemp())
        self.restic = ResticSettings(self.file)
        await super().setUp()

    async def test_refused(self) -> None:
        """Nothing is made, stored or read, and the answer says what to do, until there is a file."""
        for method, path in (
            ("HEAD", "r/config"),
            ("POST", "r/?create=true"),
            ("GET", "r/keys/"),
            ("POST", f"r/data/{'0' * 64}"),
        ):
            body = b"x" * 200_000 if method == "POST" else None
            answer = await self.expect(403, method, path, body)
            if method != "HEAD":
                self.assertIn(str(self.file).encode(), answer.body)
                self.assertIn(b"--no-auth", answer.body)
        self.assertEqual(self.site.space.used_bytes, 0)
        hashed = bcrypt.hashpw(b"annann", bcrypt.gensalt(4)).decode()
        self.file.write_text(f"ann:{hashed}\n")
        await self.expect(401, "POST", "r/?create=true", b"")
        ann = basic("ann", "annann")
        await self.expect(200, "POST", "r/?create=true", b"", authorization=ann)

    async def test_unreadable(self) -> None:
        """A file that appears and cannot be read lets nobody in."""
        self.file.mkdir()
        await self.expect(403, "POST", "r/?create=true", b"")

    async def test_contradiction(self) -> None:
        """A gateway with a password file is not started with ``--no-auth``."""
        self.file.write_text("")
        restic = attrs.evolve(self.restic, no_auth=True)
        with self.assertRaises(UsageError) as caught:
            ResticResource(self.grid, attrs.evolve(self.settings, restic=restic))
        self.assertIn(str(self.file), str(caught.exception))

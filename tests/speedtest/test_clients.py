"""Clients of gateways: whatever answers PUT /uri and GET /uri/CAP."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase
from twisted.web.http import INSUFFICIENT_STORAGE_SPACE
from twisted.web.resource import Resource
from twisted.web.server import Site

from pipegrid.errors import GridError, PipegridError, ServerUnreachable, UsageError
from pipegrid.speedtest.benchmark_clients import Comparing, GatewaySession
from pipegrid.speedtest.targets import Gateway

CAP = (
    "URI:CHK:aaaaaaaaaaaaaaaaaaaaaaaaaa:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:2:5:{}"
)


class Uri(Resource):
    """A gateway in miniature: 2 of 5, files in memory."""

    def __init__(self, trouble: int = 0, says: bytes = b"") -> None:
        super().__init__()
        self.files: dict[bytes, bytes] = {}
        self.trouble = trouble
        self.says = says

    def getChild(self, path: bytes, request: Any) -> Resource:
        """All caps are served here."""
        return self

    def render_PUT(self, request: Any) -> bytes:
        """Store a file."""
        if self.trouble:
            request.setResponseCode(self.trouble)
            return self.says
        if self.says:
            return self.says
        cap = CAP.format(1000 + len(self.files)).encode()
        self.files[cap] = request.content.read()
        request.setResponseCode(201)
        return cap

    def render_GET(self, request: Any) -> bytes:
        """Fetch a file."""
        return self.files[request.postpath[0] if request.postpath else request.prepath[-1]]


class GatewayTests(TestCase):
    """``GatewaySession`` and ``Gateway``, on loopback."""

    timeout = 30

    def serve(self, uri: Uri) -> str:
        """Serve; return the URL."""
        root = Resource()
        root.putChild(b"uri", uri)
        some: Any = reactor
        port = some.listenTCP(0, Site(root), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        return f"http://127.0.0.1:{port.getHost().port}"

    def test_there_and_back(self) -> Deferred[None]:
        """What is put comes back; the cap tells how the gateway encodes."""
        return Deferred.fromCoroutine(self._test_there_and_back())

    async def _test_there_and_back(self) -> None:
        url = self.serve(Uri())
        gateway = Gateway(reactor, f"{url}/uri/")
        await gateway.start()
        self.assertEqual((gateway.params.required_shares, gateway.params.total_shares), (2, 5))
        [trip] = await gateway.round_trips(2)
        self.assertEqual(len(trip.samples_s), 2)
        session = await gateway.open()
        content = bytes(range(256)) * 1000
        cap = await session.put(content)
        sink = Comparing(content)
        await session.get(cap, sink)
        sink.check()
        await session.close()

    def test_refusals_are_sentences(self) -> Deferred[None]:
        """A gateway that refuses, that is none, and that is not there."""
        return Deferred.fromCoroutine(self._test_refusals())

    async def _test_refusals(self) -> None:
        full = self.serve(Uri(INSUFFICIENT_STORAGE_SPACE, b"no \x1b room\nTraceback"))
        await self.assert_refused(full, GridError, "refused PUT /uri with status 507: no ? room")
        await self.assert_refused(
            self.serve(Uri(says=b"<html>\nhello")), UsageError, "is not a cap; is it a gateway?"
        )
        some: Any = reactor
        port = some.listenTCP(0, Site(Resource()), interface="127.0.0.1")
        url = f"http://127.0.0.1:{port.getHost().port}"
        await port.stopListening()
        await self.assert_refused(url, ServerUnreachable, "is it running?")

    async def assert_refused(self, url: str, kind: type[PipegridError], text: str) -> None:
        """Check that a put fails with a sentence."""
        session = GatewaySession(reactor, url)
        try:
            await session.put(b"x" * 100)
        except kind as error:
            self.assertIn(text, str(error))
        else:
            self.fail("it was not refused")
        finally:
            await session.close()

    def test_no_gateway_by_its_name(self) -> None:
        """A URL that cannot be one is refused at once."""
        for url in ("localhost:3456", "ftp://x", "http://", "http://x:port"):
            error = self.assertRaises(UsageError, Gateway, reactor, url)
            self.assertIn("http://127.0.0.1:3456", str(error))

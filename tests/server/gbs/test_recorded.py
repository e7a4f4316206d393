"""Every exchange that was recorded from a Tahoe-LAFS 1.20.0 server, in order, with this server."""

from __future__ import annotations

from typing import Any

import attrs
import cbor2

from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from tests import vectors
from tests.server.gbs.support import Reply, ServerTestCase, parse_replies


@attrs.frozen
class Difference:
    """An answer that is ours on purpose."""

    why: str
    status: int
    body: Any = None


KINDS = "there is no share of this kind, whatever there is of the other"
DIFFERENT = {
    "create again same secret": Difference(
        "an upload is taken up again by whoever knows its secret",
        200,
        {"already-have": set(), "allocated": {0, 1, 2}},
    ),
    "create no CT": Difference("the same", 200, {"already-have": set(), "allocated": {0, 1, 2}}),
    "create share 300": Difference(
        "no share has such a number, so it is refused as for want of room",
        200,
        {"already-have": set(), "allocated": set()},
    ),
    "patch bad CR": Difference("a client's mistake is not an internal error", 416),
    "patch body shorter than range": Difference("a client's mistake is not an internal error", 400),
    "patch wrong total in CR": Difference(
        "nothing was stored of the body that was shorter than its range",
        200,
        {"required": [{"begin": b, "end": e} for b, e in ((10, 20), (30, 45), (65, 100))]},
    ),
    "patch beyond allocated": Difference("a client's mistake is not an internal error", 416),
    "create again after done": Difference(
        "shares 1 and 2 are still being uploaded with this secret",
        200,
        {"already-have": {0}, "allocated": {1, 2}},
    ),
    "create after abort": Difference(
        "share 2 is still being uploaded with this secret",
        200,
        {"already-have": {0}, "allocated": {1, 2}},
    ),
    "imm as mutable list": Difference(KINDS, 200, set()),
    "imm as mutable read": Difference(KINDS, 404),
    "mut as immutable list": Difference(KINDS, 200, set()),
}
FREE_TEXT = {400, 500}  # bodies of these are texts for people
PAGES = {404, 405}  # so are those of the router's pages
HEADERS = ("content-type", "content-range")


class RecordedTests(ServerTestCase):
    """The same questions get the same answers."""

    def setUp(self) -> None:
        super().setUp()
        self.free = 1 << 36
        recorded = vectors.load("gbs-http")
        self.exchanges = recorded["exchanges"]
        swissnum = recorded["furl"].rpartition("/")[2]
        self.service = GbsService(self.store, self.durability, swissnum)
        self.server = GbsSite(self.service, self.clock)

    def test_recorded_exchanges(self) -> None:
        """Status, decoded body, type and range are those of the recording, save for stated differences."""
        unused = set(DIFFERENT)
        for number, exchange in enumerate(self.exchanges):
            name = exchange["name"]
            reply = self._ask(exchange)
            where = f"exchange {number}: {name}"
            difference = DIFFERENT.get(name)
            if difference is not None:
                unused.discard(name)
                self.assertEqual(reply.status, difference.status, where)
                if difference.body is not None:
                    self.assertEqual(cbor2.loads(reply.body), difference.body, where)
                continue
            self.assertEqual(reply.status, exchange["status"], where)
            self._compare(reply, exchange, where)
        self.assertEqual(unused, set(), "differences that there are not")

    def _ask(self, exchange: Any) -> Reply:
        connection, transport = self.connect()
        request_head = exchange["request_head"].encode("ascii")
        connection.dataReceived(request_head + b"\r\n\r\n")
        connection.dataReceived(bytes.fromhex(exchange["request_body_hex"]))
        self.settle()
        replies = parse_replies(transport.written)
        self.assertEqual(len(replies), 1, exchange["name"])
        transport.lose()
        return replies[0]

    def _compare(self, reply: Reply, exchange: Any, where: str) -> None:
        expected = {name: values[0] for name, values in exchange["response_headers"].items()}
        page = exchange["status"] in PAGES and "text/html" in expected.get("content-type", "")
        if page:
            self.assertIn("text/html", reply.headers["content-type"], where)
            allowed = [set(each.get("allow", "").split(", ")) for each in (reply.headers, expected)]
            self.assertEqual(allowed[0], allowed[1], where)
            return
        if exchange["status"] in FREE_TEXT:
            return
        for name in HEADERS:
            if exchange["status"] != 401:
                self.assertEqual(reply.headers.get(name), expected.get(name), where)
        body = exchange["response_body_hex"]
        if expected.get("content-type") == "application/cbor":
            if "..." in body:  # the recording is cut here
                self.assertEqual(reply.body.hex()[:200], body[:200], where)
            elif exchange["name"] == "version":
                self.assertEqual(shape(cbor2.loads(reply.body)), shape(loads(body)), where)
            else:
                self.assertEqual(cbor2.loads(reply.body), loads(body), where)
        else:
            self.assertEqual(reply.body.hex(), body, where)


def loads(body_hex: str) -> Any:
    """Return a recorded message."""
    return cbor2.loads(bytes.fromhex(body_hex))


def shape(value: Any) -> Any:
    """Return the keys of a message and the types of what they lead to."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return type(value)

"""``pipegrid mirror list`` from servers whose heads are unusual, as RFC 9112 permits them."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from tests.cli.test_mirror import MirrorCase
from tests.mirror.test_sprint import Server

HEADS = {
    "lines that end with LF alone": b"HTTP/1.1 200 OK\nServer: x\nContent-Length: %d\n\n",
    "a field that goes on in another line": (
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: %d\r\n\r\n"
    ),
    "a length that does": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n %d\r\nServer: x\r\n\r\n",
    "a length given twice": (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nServer: x\r\nContent-Length: %d\r\n\r\n"
    ),
    "a length given twice in a line": b"HTTP/1.1 200 OK\r\nContent-Length: %d, %d\r\n\r\n",
}


class OddHeadsTests(MirrorCase):
    """What Twisted's ``Agent`` takes, a mirror takes."""

    def test_odd_heads(self) -> Any:
        """Every file comes, of whatever form the head is."""
        return Deferred.fromCoroutine(self._test_odd_heads())

    async def _test_odd_heads(self) -> None:
        for name, head in HEADS.items():
            server = Server(self.files)
            self.addCleanup(server.close)

            def answer(path: str, _count: int, head: bytes = head) -> bytes:
                body = self.files[path]
                return head % ((len(body),) * head.count(b"%d")) + body

            server.answer = answer
            self.urls = [server.url]
            self.dest = self.dest.with_name(f"{self.dest.name}-{len(name)}")
            status, _, err = await self.mirror_list()
            self.assertEqual((status, self.found() == self.files), (0, True), (name, err))

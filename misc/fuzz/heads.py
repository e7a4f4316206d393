"""
Heads of answers as a sprint reads them: only ``UnsupportedResponse`` is raised, the look that is taken at
most of them says the same as the longer one, and who reads all of HTTP says the same or refuses it.
"""

from __future__ import annotations

from pipegrid.http11.response_parser import ResponseHead, ResponseParser
from pipegrid.mirror.epoll_response_head import USUAL_HEAD, UnsupportedResponse, parse_head


def run(data: bytes) -> None:
    """Read the bytes as a head, up to the first empty line."""
    head = (data + b"\r\n\r\n").partition(b"\r\n\r\n")[0]
    usual = USUAL_HEAD.match(head + b"\r\n\r\n")
    try:
        found = parse_head(head)
    except UnsupportedResponse as error:
        assert usual is None, "one look takes what the other refuses"
        assert str(error)
        return
    assert 200 <= found.status <= 999
    assert found.length >= 0
    if usual is not None:
        assert usual.end() == len(head) + 4, "one look ends elsewhere"
        assert (found.status, found.length, found.closes) == (200, int(usual[1]), False)
    parser = ResponseParser()
    parser.expect()
    events = parser.feed(head + b"\r\n\r\n")
    if events and isinstance(events[0], ResponseHead) and parser.error is None:
        assert events[0].status == found.status, "the statuses differ"
        assert events[0].length in (None, found.length), "the lengths differ"


def seeds() -> dict[str, bytes]:
    """Return heads, good and bad."""
    nginx = (
        b"HTTP/1.1 200 OK\r\nServer: nginx/1.26.3\r\nDate: Mon, 23 Nov 2026 02:36:10 GMT\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: 656\r\n"
        b"Last-Modified: Mon, 23 Nov 2026 02:36:10 GMT\r\nConnection: keep-alive\r\n"
        b'ETag: "656-1"\r\nAccept-Ranges: bytes\r\n\r\n'
    )
    return {
        "nginx": nginx,
        "nginx-closes": nginx.replace(b"keep-alive", b"close"),
        "plain": b"HTTP/1.1 404 No\r\nA: b\r\ncontent-length:4\r\nConnection: Close\r\n\r\n",
        "two-lengths": nginx.replace(b"ETag", b"Content-Length: 7\r\nETag"),
        "chunked": nginx.replace(b"ETag", b"Transfer-Encoding: chunked\r\nETag"),
        "old": b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n",
        "folded": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n 4\r\n\r\n",
    }

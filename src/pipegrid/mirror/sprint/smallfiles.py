"""
Small files whose hash nobody knows beforehand, without a reactor: all asked for at once, on one connection.

They are what everything begins with, so nothing else is done meanwhile. A mirror that does anything but give
them, or say that it has none, is for ``mirror.small`` to ask again, which says what is wrong with it; and so
is one from which next to nothing comes. One that is merely slow is waited for: asked again, it would begin
anew.
"""

from __future__ import annotations

import os
import select
import time
from _socket import SO_ERROR, SOL_SOCKET, socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pipegrid.mirror.address import Address, small_request
from pipegrid.mirror.sprint.dialling import BegunConnections, securing
from pipegrid.mirror.sprint.heads import LF_ALONE, MAX_HEAD_BYTES, Odd, parse_head
from pipegrid.mirror.sprint.headstart import begin, place_of

STALL_S = 5.0
PACE_BYTES = 4 << 10
"""At least so many are to come in any ``STALL_S``; who gives less gives next to nothing."""

MOST_S = 120.0
"""For all of it, however it comes."""

LOOK_S = 0.1
"""How often it is looked, while waiting, whether all is to end."""

READ_BYTES = 64 << 10
MISSING_BYTES = 64 << 10
"""Of what is said instead of a file that is not there."""


REFUSING = frozenset({400, 401, 403, 404, 405, 406, 410, 451})
"""How servers say that they do not have a file, or do not give it; S3 that may not be listed answers 403."""


class SmallAnswers(dict[str, bytes]):
    """
    Files by path, as far as a mirror gives them.

    Attributes:
        refused: by path, what it answers in place of the others, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}


def may_be(path: str, data: bytes) -> bool:
    """Return whether a file looks like what its name says: pipelined answers may have been mixed up."""
    begins = data.lstrip()[:30]
    if path.endswith("InRelease"):
        return begins.startswith(b"-----BEGIN PGP SIGNED")
    if path.endswith((".gpg", ".asc")):
        return begins.startswith(b"-----BEGIN PGP SIGNATURE") or data[:1] >= b"\x80"
    return not begins.startswith(b"-----BEGIN PGP")


def fetch_small(
    address: Address,
    asked: Sequence[tuple[str, int]],
    ahead: BegunConnections,
    stopped: Callable[[], bool],
) -> SmallAnswers:
    """
    Return of some files, each with the most bytes that it may have, those that the mirror has.

    Args:
        ahead: has begun to connect, and is given the connection that was used.

    Raises:
        OSError, Odd: it does anything else, or takes long; or all is to end.
    """
    sock, count = ahead.take(address) or (begin(place_of(*address.place)), 0)
    asking = _Asking(sock, stopped)
    try:
        asking.connect(address)
        asking.send(b"".join(small_request(address, path) for path, _ in asked))
        found = asking.answers(asked)
        for path, answer in found.refused.items():
            found.refused[path] = f"{address.url} {answer} for {path}"
    except BaseException:
        asking.sock.close()
        raise
    if asking.closes:
        asking.sock.close()
    else:
        asking.sock.setblocking(False)
        ahead.give(address, asking.sock, count + len(asked))
    return found


class _Asking:
    """One connection, for as long as it is waited for."""

    def __init__(self, sock: socket, stopped: Callable[[], bool]) -> None:
        self.sock: Any = sock
        self.closes = False
        self._stopped = stopped
        self._data = bytearray()
        self._since_s = time.monotonic()
        self._until_s = self._since_s + MOST_S
        self._came_bytes = 0  # since then

    def _check(self, came_bytes: int = 0) -> None:
        now_s = time.monotonic()
        self._came_bytes += came_bytes
        if self._came_bytes >= PACE_BYTES:
            self._since_s, self._came_bytes = now_s, 0
        if self._stopped() or now_s > min(self._until_s, self._since_s + STALL_S):
            raise Odd("it took too long")

    def _wait(self, do: Callable[[], Any]) -> Any:
        while True:
            with suppress(TimeoutError):
                return do()
            self._check()

    def connect(self, address: Address) -> None:
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        while not poll.poll(LOOK_S * 1000):
            self._check()
        failed = self.sock.getsockopt(SOL_SOCKET, SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        if address.scheme == "https" and not hasattr(self.sock, "do_handshake"):
            self.sock = securing(address)(self.sock)
        self.sock.settimeout(LOOK_S)
        if address.scheme == "https":
            self._wait(self.sock.do_handshake)

    def send(self, data: bytes) -> None:
        if self._wait(lambda: self.sock.send(data)) < len(data):
            raise Odd("it does not take requests")

    def answers(self, asked: Sequence[tuple[str, int]]) -> SmallAnswers:
        found = SmallAnswers()
        for path, most_bytes in asked:
            if self.closes:
                raise Odd("it closes after an answer")
            status, body = self._answer(most_bytes)
            if status == 200:
                if not may_be(path, body):
                    raise Odd("its answers may be mixed up")
                found[path] = body
            else:
                found.refused[path] = f"answers {status}"
        if self._data:
            raise Odd("it answers what nobody asked")
        return found

    def _answer(self, most_bytes: int) -> tuple[int, bytes]:
        data = self._data
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise Odd("its heads are too long")
            if b"\n\n" in data:
                raise Odd(LF_ALONE)
            self._read()
        if end > MAX_HEAD_BYTES:
            raise Odd("its heads are too long")
        head = parse_head(bytes(data[:end]))
        if head.status != 200 and head.status not in REFUSING:
            raise Odd(f"it answers {head.status}")
        if head.length > (most_bytes if head.status == 200 else MISSING_BYTES):
            raise Odd("its answer is too long")
        after = end + 4 + head.length
        while len(data) < after:
            self._read()
        body = bytes(data[end + 4 : after])
        del data[:after]
        self.closes = head.closes
        return head.status, body

    def _read(self) -> None:
        got = self._wait(lambda: self.sock.recv(READ_BYTES))
        if not got:
            raise Odd("it closed the connection")
        self._data += got
        self._check(len(got))

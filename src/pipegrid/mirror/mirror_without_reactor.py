"""A mirror that does without a reactor: most runs end in less time than the import of a reactor takes."""

from __future__ import annotations

import os
import select
import time
from _socket import SO_ERROR, SOL_SOCKET, socket
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from pipegrid.disk.durability import Policy
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.connection_scheduler import SmallRoutes
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.epoll_response_head import (
    LF_ALONE,
    MAX_HEAD_BYTES,
    REDIRECTS,
    Head,
    SmallResponses,
    UnsupportedResponse,
    may_be,
    parse_head,
)
from pipegrid.mirror.epoll_socket_cache import SocketCache, securing
from pipegrid.mirror.fetch_run import MirrorRun
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.local_check import MirrorEntry, VerifyPolicy
from pipegrid.mirror.mirror_urls import Address, small_request
from pipegrid.mirror.preconnect_mirrors import begin, place_of

if TYPE_CHECKING:
    from pipegrid.mirror.mirror_api import Mirror


# Small files with unknown hashes, without a reactor: all are requested at once, on one connection.
#
# Every run begins with these files and does nothing else at the same time. A mirror should send each file, or
# respond that it lacks the file. If a mirror does neither, or sends almost nothing, ``mirror.mirror_api``
# requests the files again and reports what is wrong. A mirror that is merely slow is waited for, since a new
# request would start from the beginning.

STALL_S = 5.0
PACE_BYTES = 4 << 10
"""The minimum that must arrive in every period of ``STALL_S``."""

MOST_S = 120.0
"""The time limit for the small files that are requested from one host."""

LOOK_S = 0.1
"""How often to check, while waiting, whether the run must end."""

READ_BYTES = 64 << 10
MISSING_BYTES = 64 << 10
"""The maximum length of a response that reports a missing file."""


REFUSING = frozenset({400, 401, 403, 404, 405, 406, 410, 451})
"""Statuses for a missing or refused file. S3 responds 403 for missing files if clients may not list them."""


def fetch_small(
    address: Address,
    asked: Sequence[tuple[str, int]],
    ahead: SocketCache,
    stopped: Callable[[], bool],
) -> SmallResponses:
    """
    Return the files that the mirror has; ``asked`` has the path and the limit in bytes of each wanted file.

    Args:
        ahead: may have opened connections in advance, and gets back the connection that was used.

    Raises:
        OSError, UnsupportedResponse: the mirror does anything unusual or takes too long, or the run must end.
    """
    found = SmallResponses()
    most_bytes = dict(asked)
    routes = SmallRoutes(address)
    left = {path: routes.first(path) for path in most_bytes}
    while left:
        here = next(iter(left.values())).address
        group = {path: left.pop(path) for path in [*left] if left[path].address is here}
        answers = _fetch_at(
            here, [(path, group[path].target, most_bytes[path]) for path in group], ahead, stopped
        )
        for path, route in group.items():
            head, body = answers[path]
            if head.status == 200:
                found[path] = body
                routes.served(route)
                continue
            again = routes.after(path, route, head.status, head.locations)
            if isinstance(again, str):
                found.refused[path] = again
            elif again.address.proxy is not None:
                raise UnsupportedResponse("it redirects to where a proxy is needed")
            else:
                left[path] = again
    return found


def _fetch_at(
    address: Address,
    asked: Sequence[tuple[str, bytes, int]],
    ahead: SocketCache,
    stopped: Callable[[], bool],
) -> dict[str, tuple[Head, bytes]]:
    """
    Return the responses of one host by path; ``asked`` has the path, the target and the limit in bytes of
    each file.
    """
    sock, count = ahead.take(address) or (begin(place_of(*address.place)), 0)
    asking = _Asking(sock, stopped)
    try:
        asking.connect(address)
        asking.send(b"".join(small_request(address, target) for _, target, _ in asked))
        found = asking.answers([(path, most_bytes) for path, _, most_bytes in asked])
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
    """One connection, with its requests and responses."""

    def __init__(self, sock: socket, stopped: Callable[[], bool]) -> None:
        self.sock: Any = sock
        self.closes = False
        self._stopped = stopped
        self._data = bytearray()
        self._since_s = time.monotonic()
        self._until_s = self._since_s + MOST_S
        self._came_bytes = 0  # since ``_since_s``

    def _check(self, came_bytes: int = 0) -> None:
        now_s = time.monotonic()
        self._came_bytes += came_bytes
        if self._came_bytes >= PACE_BYTES:
            self._since_s, self._came_bytes = now_s, 0
        if self._stopped() or now_s > min(self._until_s, self._since_s + STALL_S):
            raise UnsupportedResponse("it took too long")

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
            raise UnsupportedResponse("it does not take requests")

    def answers(self, asked: Sequence[tuple[str, int]]) -> dict[str, tuple[Head, bytes]]:
        found: dict[str, tuple[Head, bytes]] = {}
        for path, most_bytes in asked:
            if self.closes:
                raise UnsupportedResponse("it closes after a response")
            head, body = found[path] = self._answer(most_bytes)
            if head.status == 200 and not may_be(path, body):
                raise UnsupportedResponse("its responses may be confused")
        if self._data:
            raise UnsupportedResponse("it sends a response without a request")
        return found

    def _answer(self, most_bytes: int) -> tuple[Head, bytes]:
        data = self._data
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise UnsupportedResponse("its heads are too long")
            if b"\n\n" in data:
                raise UnsupportedResponse(LF_ALONE)
            self._read()
        if end > MAX_HEAD_BYTES:
            raise UnsupportedResponse("its heads are too long")
        head = parse_head(bytes(data[:end]))
        if head.status != 200 and head.status not in REFUSING | REDIRECTS:
            raise UnsupportedResponse(f"it answers {head.status}")
        if head.length > (most_bytes if head.status == 200 else MISSING_BYTES):
            raise UnsupportedResponse("its response is too long")
        after = end + 4 + head.length
        while len(data) < after:
            self._read()
        body = bytes(data[end + 4 : after])
        del data[:after]
        self.closes = head.closes
        return head, body

    def _read(self) -> None:
        got = self._wait(lambda: self.sock.recv(READ_BYTES))
        if not got:
            raise UnsupportedResponse("it closed the connection")
        self._data += got
        self._check(len(got))


# A mirror that works without a reactor, until one is needed.
#
# A coroutine brings an archive up to date and awaits calls of its mirror. This mirror finishes each call
# before it returns, so in the usual case the coroutine runs to its end without waiting. If a call needs more
# than that, ``mirror_api.Mirror`` does this call and all later ones: the coroutine waits until there is such
# a mirror, and does not notice the change.

P = ParamSpec("P")
T = TypeVar("T")


class _Later:
    """Pauses a coroutine whose call has to wait for a reactor."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class FetchRules(NamedTuple):
    """
    Settings for fetching files.

    Attributes:
        verify: which existing files are hashed again.
        durability: as for storage servers (``disk.durability``).
        connections: the maximum to each mirror.
    """

    verify: VerifyPolicy
    durability: Policy
    connections: int


class BlockingMirror:
    """
    A mirror with the methods of ``mirror_api.Mirror``, which documents them; works without a reactor until
    one is needed.

    Args:
        addresses: of the mirrors, without proxies.
        ahead: may have opened connections to the mirrors in advance.
        stopped: returns whether the run must end.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        destination: Destination,
        rules: FetchRules,
        ahead: SocketCache,
        stopped: Callable[[], bool],
        progress: Callable[[Report], None] | None = None,
    ) -> None:
        self._addresses = addresses
        self.urls = [address.url for address in addresses]
        self.destination = destination
        self._rules = rules
        self._preconnected = ahead
        self._stopped = stopped
        self._progress = progress
        self._mirror: Mirror | None = None

    def go_on(self, mirror: Mirror) -> None:
        """Continue with a mirror that uses a reactor and has the same destination."""
        self._mirror = mirror

    async def _late(self) -> Mirror:
        if self._mirror is None:
            self._check()
            await _Later()
        assert self._mirror is not None
        return self._mirror

    def _check(self) -> None:
        if self._stopped():
            raise MirrorError(
                f"{self.destination.path}: stopped; the same command can be run again"
            )

    def is_stopped(self) -> bool:
        """Return whether the run must end."""
        return self._stopped() if self._mirror is None else self._mirror.is_stopped()

    async def fetch_small(self, number: int, asked: Sequence[tuple[str, int]]) -> SmallResponses:
        if self._mirror is None:
            self._check()
            address = self._addresses[number]
            with suppress(OSError, UnsupportedResponse):
                return fetch_small(address, asked, self._preconnected, self._stopped)
        return await (await self._late()).fetch_small(number, asked)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._mirror is not None:
            return await self._mirror.run(function, *args, **kwargs)
        self._check()
        return function(*args, **kwargs)

    async def sync(
        self, files: Iterable[MirrorEntry], *, staged: bool = False, always: bool = False
    ) -> Report:
        """Do the same as ``Mirror.sync``; this mirror never does a dry run."""
        if self._mirror is not None:
            return await self._mirror.sync(files, staged=staged, always=always)
        self._check()
        work = MirrorRun(self.destination, self._addresses, self._rules.verify, staged)
        if work.run_on_epoll(
            files,
            self._rules.durability,
            self._rules.connections,
            self._stopped,
            self._progress,
            preconnected=self._preconnected,
        ):
            work.finish()
            return work.sum_up()
        return await (await self._late()).finish(work)


def begin_early(work: Coroutine[Any, Any, T]) -> list[T] | None:
    """
    Run a coroutine on a ``BlockingMirror``; return a list with its result, or None if it needs a reactor to
    continue.
    """
    try:
        work.send(None)
    except StopIteration as done:
        return [done.value]
    return None

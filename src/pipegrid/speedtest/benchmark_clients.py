"""
The clients that the speed test measures: sessions with a grid, or with a gateway over HTTP; and the files
that they transfer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import quote

from twisted.internet.defer import CancelledError

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CorruptionError, GridError, ServerUnreachable, UsageError
from pipegrid.grid.file_grid import Grid

# Files have new random bytes, so that no file is stored already or can be compressed.


def new_files(rng: random.Random, sizes: Iterable[int]) -> list[bytes]:
    """Return files of these sizes with random bytes; generators with equal seeds give equal files."""
    return [rng.randbytes(size) for size in sizes]


class Comparing:
    """
    A sink in preallocated memory; later its content is compared with the expected bytes.

    So while time is measured, each byte is copied once, as when writing to a file, and no memory page is
    touched for the first time.
    """

    name = "the comparison"
    written_in_reactor = True  # writing never waits

    def __init__(self, expected: bytes) -> None:
        self._expected = expected
        self._got = memoryview(bytearray(expected[::-1]))
        self._at = 0

    def write(self, data: Any) -> int:
        """
        Store the next bytes.

        Raises:
            CorruptionError: there are more bytes than expected.
        """
        size = len(data)
        if self._at + size > len(self._expected):
            raise CorruptionError(f"more than {len(self._expected)} bytes came back")
        self._got[self._at : self._at + size] = data
        self._at += size
        return size

    def flush(self) -> None:
        """Do nothing, since nothing is buffered."""

    def check(self) -> None:
        """
        Compare the received bytes with the expected ones.

        Raises:
            CorruptionError: the bytes differ.
        """
        if self._at != len(self._expected):
            raise CorruptionError(
                f"{self._at} bytes came back instead of {len(self._expected)}; no figure is taken from that"
            )
        if self._got.obj != self._expected:
            raise CorruptionError("other bytes came back than were stored; report this")


# A gateway is any HTTP server that stores the body of a ``PUT`` to ``/uri``, answers with a cap, and returns
# the file for ``GET /uri/CAP``. Nodes of Tahoe-LAFS do so, too, and are measured by the same code.

MAX_CAP_BYTES = 4096


MAX_TROUBLE_CHARACTERS = 200


GATEWAY_CONNECTIONS = 100


GATEWAY_CONNECT_TIMEOUT_S = 30.0


class Session(Protocol):
    """A client whose connections stay open between calls."""

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Store a file; returns its cap."""

    async def get(self, cap: str, sink: Comparing) -> None:
        """Read a file into ``sink``, which later compares the bytes with the expected ones."""

    async def close(self) -> None:
        """End the session, with all its connections."""


class GridSession:
    """
    A session with ``pipegrid.Grid``, which it uses as an application does.

    Args:
        every_share: fail if a put ended without waiting for some servers. With equal servers every share
            should be sent; otherwise the measured time would belong to fewer bytes than assumed.
    """

    def __init__(self, grid: Grid, every_share: bool = False) -> None:
        self._grid = grid
        self._every_share = every_share

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """
        Store a file. In the encoding sweep, happiness is reduced to the number of shares if they are fewer.
        """
        happy = None
        if params is not None:
            happy = min(self._grid.config.happy, params.total_shares)
        result = await self._grid.put(data, params=params, happy=happy)
        if self._every_share and result.dropped:
            raise GridError(
                f"a put of {len(data)} bytes did not wait for {', '.join(result.dropped)}, so its time says "
                "nothing; measure again on a machine that is less busy"
            )
        return str(result.cap)

    async def get(self, cap: str, sink: Comparing) -> None:
        await self._grid.get(cap, cast(BinaryIO, sink))

    async def close(self) -> None:
        await self._grid.close()


class GatewaySession:
    """
    A session with a gateway: an HTTP client with its own connections.

    Args:
        url: of the gateway, without ``/uri``.
    """

    def __init__(self, reactor: Any, url: str) -> None:
        import treq
        from twisted.web.client import Agent, HTTPConnectionPool

        self._url = url
        self._pool = HTTPConnectionPool(reactor)
        self._pool.maxPersistentPerHost = GATEWAY_CONNECTIONS
        self._pool.retryAutomatically = False  # a repeated put would be measured twice
        agent = Agent(reactor, connectTimeout=GATEWAY_CONNECT_TIMEOUT_S, pool=self._pool)
        self._client = treq.client.HTTPClient(agent)

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Store a file with the gateway's own encoding parameters."""
        import treq

        response = await self._ask("PUT", f"{self._url}/uri", data=data)
        cap = bytearray()
        await treq.collect(response, cap.extend)
        text = bytes(cap[:MAX_CAP_BYTES]).decode("utf-8", "replace").strip()
        if not text or len(cap) > MAX_CAP_BYTES or "\n" in text:
            raise UsageError(
                f"{self._url} answered PUT /uri with {_shown(text)}, which is not a cap; is it a gateway?"
            )
        return text

    async def get(self, cap: str, sink: Comparing) -> None:
        import treq

        response = await self._ask("GET", f"{self._url}/uri/{quote(cap, safe=':')}")
        take: Any = sink.write
        await treq.collect(response, take)

    async def close(self) -> None:
        await self._pool.closeCachedConnections()

    async def _ask(self, method: str, url: str, **options: Any) -> Any:
        import treq

        try:
            response = await self._client.request(method, url, unbuffered=True, **options)
        except CancelledError:
            raise
        except Exception as error:
            raise ServerUnreachable(
                f"cannot reach the gateway {self._url}: {_reason(error)}; is it running?", self._url
            ) from error
        if response.code not in (200, 201):
            said = await treq.text_content(response, "utf-8")
            raise GridError(
                f"the gateway {self._url} refused {method} /uri with status {response.code}:"
                f" {_shown(said)}"
            )
        return response


def _reason(error: Exception) -> str:
    """Return the original error of a failure, which HTTP clients nest in other errors."""
    reasons = getattr(error, "reasons", None)
    if reasons:
        error = reasons[0].value
    return str(error).rstrip(".") or type(error).__name__


def _shown(text: str) -> str:
    """Return the first line of untrusted text, made safe to show."""
    lines = text.strip().splitlines() or ["nothing"]
    line = lines[0][:MAX_TROUBLE_CHARACTERS]
    return "".join(char if char.isprintable() else "?" for char in line)

"""
One client of whatever is measured: it puts and gets files. A grid's, or that of a gateway over HTTP.

A gateway is any HTTP server that stores what is ``PUT`` to ``/uri``, answers with a cap, and gives it back
to ``GET /uri/CAP``: Tahoe-LAFS's nodes do, and so they are measured by the code that measures PipeGrid.
"""

from __future__ import annotations

from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import quote

from twisted.internet.defer import CancelledError

from pipegrid.core.params import Params
from pipegrid.errors import GridError, ServerUnreachable, UsageError
from pipegrid.grid.grid import Grid
from pipegrid.speedtest.contents import Comparing

MAX_CAP_BYTES = 4096
MAX_TROUBLE_CHARACTERS = 200
GATEWAY_CONNECTIONS = 100
CONNECT_TIMEOUT_S = 30.0


class Session(Protocol):
    """A client; its connections stay up between calls."""

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Store a file; returns its cap."""

    async def get(self, cap: str, sink: Comparing) -> None:
        """Fetch a file into ``sink``, which compares it with what was put."""

    async def close(self) -> None:
        """End the session, with all its connections."""


class GridSession:
    """
    ``pipegrid.Grid``, as an application uses it.

    Args:
        every_share: fail if a put does not wait for some server: on servers that are all alike its time would
            be set against bytes that were not sent.
    """

    def __init__(self, grid: Grid, every_share: bool = False) -> None:
        self._grid = grid
        self._every_share = every_share

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Store a file; fewer servers than shares of a sweep are no reason to fail."""
        happy = None
        if params is not None:
            happy = min(self._grid.config.happy, params.total_shares)
        result = await self._grid.put(data, params=params, happy=happy)
        if self._every_share and result.dropped:
            raise GridError(
                f"a put of {len(data)} bytes did not wait for {', '.join(result.dropped)}, so its time"
                " tells nothing; measure again on a machine that does less besides"
            )
        return str(result.cap)

    async def get(self, cap: str, sink: Comparing) -> None:
        await self._grid.get(cap, cast(BinaryIO, sink))

    async def close(self) -> None:
        await self._grid.close()


class GatewaySession:
    """
    An HTTP client with connections of its own.

    Args:
        url: of the gateway, without ``/uri``.
    """

    def __init__(self, reactor: Any, url: str) -> None:
        import treq
        from twisted.web.client import Agent, HTTPConnectionPool

        self._url = url
        self._pool = HTTPConnectionPool(reactor)
        self._pool.maxPersistentPerHost = GATEWAY_CONNECTIONS
        self._pool.retryAutomatically = False  # a put that is sent twice would be timed twice
        agent = Agent(reactor, connectTimeout=CONNECT_TIMEOUT_S, pool=self._pool)
        self._client = treq.client.HTTPClient(agent)

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Store a file as the gateway is configured to."""
        import treq

        response = await self._ask("PUT", f"{self._url}/uri", data=data)
        cap = bytearray()
        await treq.collect(response, cap.extend)
        text = bytes(cap[:MAX_CAP_BYTES]).decode("utf-8", "replace").strip()
        if not text or len(cap) > MAX_CAP_BYTES or "\n" in text:
            raise UsageError(
                f"{self._url} answered PUT /uri with {_shown(text)}, which is no cap; is it a gateway?"
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
    """Return what went wrong, without the nesting that HTTP clients wrap it in."""
    reasons = getattr(error, "reasons", None)
    if reasons:
        error = reasons[0].value
    return str(error).rstrip(".") or type(error).__name__


def _shown(text: str) -> str:
    """Return the first line of a stranger's text, as far as it can be shown."""
    lines = text.strip().splitlines() or ["nothing"]
    line = lines[0][:MAX_TROUBLE_CHARACTERS]
    return "".join(char if char.isprintable() else "?" for char in line)

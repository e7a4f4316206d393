"""
Small files whose hash nobody knows beforehand: the release files with which everything begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint

from pipegrid.errors import ServerError
from pipegrid.http11 import HostPool, Limits, RawRequest
from pipegrid.mirror.address import Address, small_request
from pipegrid.mirror.wanted import MirrorError
from pipegrid.reactor.together import together

TIMEOUT_S = 20.0


class SmallFiles:
    """Asks one mirror; to be closed."""

    def __init__(self, reactor: Any, address: Address, endpoint: Any) -> None:
        def connect() -> IStreamClientEndpoint:
            made: IStreamClientEndpoint = endpoint()
            return made

        self._address = address
        self._pool = HostPool(
            reactor,
            connect,
            address.netloc.decode("ascii"),
            Limits(max_connections=1, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S),
        )

    async def fetch(self, path: str, most_bytes: int) -> bytes | None:
        """
        Return a file, or None if the mirror has none of that name.

        Raises:
            MirrorError: it cannot be asked, answers something else, or the file is longer than that.
        """
        head = small_request(self._address, path)
        try:
            answer = await self._pool.request(RawRequest(head, max_body_bytes=most_bytes))
        except ServerError as error:
            raise MirrorError(f"{self._address.url}: {error}") from error
        if answer.status in (404, 410):
            return None
        if answer.status != 200:
            raise MirrorError(f"{self._address.url} answers {answer.status} for {path}")
        return answer.body

    async def fetch_all(self, asked: Sequence[tuple[str, int]]) -> dict[str, bytes]:
        """
        Return of some files, each with the most bytes that it may have, those that the mirror has.

        All are asked for at once, and the connection is ended then.

        Raises:
            MirrorError: as ``fetch``.
        """
        try:
            answers = await together(
                [Deferred.fromCoroutine(self.fetch(path, most)) for path, most in asked]
            )
        finally:
            await self.close()
        found = zip(asked, answers, strict=True)
        return {path: data for (path, _), data in found if data is not None}

    async def close(self) -> None:
        """Close the connections to the mirror, and wait until they are gone."""
        await self._pool.close()

"""
Small files whose hash nobody knows beforehand: the release files with which everything begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater

from pipegrid.errors import ServerError
from pipegrid.http11 import HostPool, Limits, RawRequest, RawResponse
from pipegrid.mirror.address import Address, small_request
from pipegrid.mirror.exchange import retry_after_s
from pipegrid.mirror.sprint.heads import BUSY
from pipegrid.mirror.sprint.smallfiles import SmallAnswers, may_be
from pipegrid.mirror.wanted import MirrorError, quoted
from pipegrid.reactor.together import together

TIMEOUT_S = 20.0
MOST_S = 300.0
"""For all that is asked for at once, however it comes: who drips is left for the next mirror."""

PAUSES_S = (1.0, 5.0)
"""After which a mirror is asked again that has too much to do, if it does not ask for more."""


class SmallFiles:
    """
    Asks one mirror; to be closed.

    Args:
        serial: one request after the other.
    """

    def __init__(self, reactor: Any, address: Address, endpoint: Any, serial: bool = False) -> None:
        def connect() -> IStreamClientEndpoint:
            made: IStreamClientEndpoint = endpoint()
            return made

        self._clock = reactor
        self._endpoint = endpoint
        self._serial = serial
        self._address = address
        self._pool = HostPool(
            reactor,
            connect,
            address.netloc.decode("ascii"),
            Limits(max_connections=1, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S),
            serial=serial,
        )

    async def fetch(self, path: str, most_bytes: int) -> bytes | str:
        """
        Return a file, or in words what the mirror answers in its place.

        Raises:
            MirrorError: it cannot be asked, or the file is longer than that.
        """
        answer = await self._ask(path, most_bytes)
        for pause_s in PAUSES_S:
            if answer.status not in BUSY:
                break
            pause_s = max(pause_s, retry_after_s(answer.header_list))
            await deferLater(self._clock, pause_s)
            answer = await self._ask(path, most_bytes)
        if answer.status == 200:
            return answer.body
        where = answer.headers.get(b"location", b"").decode("ascii", "replace")
        return f"{self._address.url} answers {answer.status} for {path}" + (
            f", and leads to {_elsewhere(where, path)}" if where else ""
        )

    async def _ask(self, path: str, most_bytes: int) -> RawResponse:
        head = small_request(self._address, path)
        try:
            return await self._pool.request(RawRequest(head, max_body_bytes=most_bytes))
        except ServerError as error:
            raise MirrorError(f"{self._address.url}: {error}") from error

    async def fetch_all(self, asked: Sequence[tuple[str, int]]) -> SmallAnswers:
        """
        Return of some files, each with the most bytes that it may have, those that the mirror gives.

        What else it answers is told as well: many refuse what they do not have with another status than 404,
        and not all that is asked for has to be there.

        All are asked for at once, and the connection is ended then.

        Raises:
            MirrorError: as ``fetch``.
        """
        asking = Deferred.fromCoroutine(
            together([Deferred.fromCoroutine(self.fetch(path, most)) for path, most in asked])
        )
        try:
            answers = await asking.addTimeout(MOST_S, self._clock)
        except TimeoutError:
            raise MirrorError(
                f"{self._address.url}: {asked[0][0]} has not come within {MOST_S:.0f} s; use another mirror"
            ) from None
        finally:
            await self.close()
        found = SmallAnswers()
        for (path, _), data in zip(asked, answers, strict=True):
            if isinstance(data, str):
                found.refused[path] = data
            else:
                found[path] = data
        if not self._serial and not all(may_be(path, data) for path, data in found.items()):
            # No hash tells whether pipelined answers were mixed up.
            again = SmallFiles(self._clock, self._address, self._endpoint, serial=True)
            return await again.fetch_all(asked)
        return found

    async def close(self) -> None:
        """Close the connections to the mirror, and wait until they are gone."""
        await self._pool.close()


def _elsewhere(where: str, path: str) -> str:
    return f"{quoted(where.removesuffix(path))}; give that with --from, if it is the mirror that you mean"

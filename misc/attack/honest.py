"""
An honest client: stores a small share, reads it again, on a new connection each time; how long that takes.

A new connection is the hardest case: a server that is full of strangers must still let it in. It is raw
requests in this process, one after the other, so that what is timed is the server and not a client's work.
"""

from __future__ import annotations

import random
import ssl
import statistics
import time

import attrs

from misc.attack.target import Target

SHARE_BYTES = 200
PAUSE_S = 0.03
PATIENCE_S = 10.0


@attrs.define
class Times:
    """
    What an honest client met.

    Attributes:
        seconds: of each try that succeeded.
        failures: what was wrong with the others.
    """

    seconds: list[float] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)

    @property
    def median_s(self) -> float:
        """Of the tries that succeeded; infinite if none did."""
        return statistics.median(self.seconds) if self.seconds else float("inf")

    @property
    def worst_s(self) -> float:
        """Of the tries that succeeded; infinite if one did not."""
        return float("inf") if self.failures or not self.seconds else max(self.seconds)


class Client:
    """Puts and gets small shares."""

    def __init__(self, target: Target, rng: random.Random) -> None:
        self._target = target
        self._rng = rng

    def run(self, seconds: float) -> Times:
        """Go on for so long, at least once."""
        times = Times()
        ends = time.monotonic() + seconds
        while not (times.seconds or times.failures) or time.monotonic() < ends:
            began = time.monotonic()
            try:
                self.put_and_get()
            except (OSError, AssertionError) as error:
                times.failures.append(f"{type(error).__name__}: {error}"[:200])
            else:
                times.seconds.append(time.monotonic() - began)
            time.sleep(PAUSE_S)
        return times

    def put_and_get(self) -> None:
        """
        Store a share, all requests at once, then read it.

        Raises:
            OSError: the connection was refused or cut, or it took too long.
            AssertionError: an answer was not what it must be.
        """
        index, content = self._rng.randbytes(16), self._rng.randbytes(SHARE_BYTES)
        requests = self._target.requests
        with self._target.connect_tls() as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(
                requests.allocate(index, SHARE_BYTES) + requests.write(index, 0, content)
            )
            _receive(connection, b"HTTP/1.1 201 ")
            connection.sendall(requests.read(index, 0, SHARE_BYTES))
            _receive(connection, content)


def _receive(connection: ssl.SSLSocket, wanted: bytes) -> None:
    """Receive answers until one holds what is wanted."""
    answers = b""
    while wanted not in answers:
        data = connection.recv(65536)
        if not data:
            raise ConnectionError(f"the server closed the connection after {answers[:100]!r}")
        answers += data
        for refusal in (b"HTTP/1.1 4", b"HTTP/1.1 5"):
            assert refusal not in answers, f"refused: {answers[:200]!r}"

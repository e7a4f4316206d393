"""Raw TCP: what plain and encrypted streams carry on the path that the scenarios take. (Interface first.)"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.speedtest.results import Baseline, Measurement, RoundTrip


@attrs.frozen
class Responder:
    """
    Where a responder is, and what opens it.

    Attributes:
        token: the shared secret.
        spki_hash: SHA-256 of its public key, for TLS; None: whoever knows the token is trusted.
    """

    host: str
    port: int
    token: str
    spki_hash: bytes | None = None


@attrs.frozen
class Effort:
    """
    How much to measure.

    Attributes:
        rounds: samples of each kind.
        sample_s: about how long one takes; at least ten round trips are taken.
        pings: exchanges for each round trip time.
    """

    rounds: int = 3
    sample_s: float = 0.5
    pings: int = 20


def measure_baselines(
    reactor: Any,
    responders: Sequence[Responder],
    effort: Effort = Effort(),
    *,
    tls: Sequence[bool] = (False, True),
) -> Deferred[list[Baseline]]:
    """
    Measure one stream and one to each responder, up and down; samples are in ``before``.

    Call it before and after the scenarios, and join both with ``join``.
    """
    raise NotImplementedError


def join(before: Sequence[Baseline], after: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """Return baselines with the samples of two calls, as ``before`` and ``after``."""
    raise NotImplementedError


def ping_responders(
    reactor: Any, responders: Sequence[Responder], count: int = 20
) -> Deferred[list[RoundTrip]]:
    """Measure the round trip to each responder by tiny exchanges on a connection that is up."""
    raise NotImplementedError


def ping_servers(
    reactor: Any, exchanges: Mapping[str, Callable[[], Awaitable[Any]]], count: int = 20
) -> Deferred[list[RoundTrip]]:
    """
    Measure the round trip to each server of a grid: the time of a tiny answer on a connection that is up.

    Args:
        exchanges: by the server's name; each asks for little and waits for the answer, as
            ``StorageServer.version`` does. The first call of each, which may connect, does not count.
    """
    raise NotImplementedError


def perfect_pipe(
    reactor: Any,
    responders: Sequence[Responder],
    size_bytes: int,
    effort: Effort = Effort(),
    *,
    tls: bool = False,
) -> Deferred[list[Measurement]]:
    """
    The self-check: raw streams of so many bytes in all, measured as if they were a scenario, up and down.

    Set beside ``measure_baselines`` of the same run it must report 100 % of raw TCP, within 3 %.
    """
    raise NotImplementedError

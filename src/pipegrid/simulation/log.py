"""What passed through the network, for assertions, for debugging and for drawing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipegrid.links.link import to_seconds


class SentAcross(NamedTuple):
    """
    One thing on its way from one host to another.

    Attributes:
        start_ns, end_ns: while it was on the line.
        arrival_ns: when all of it arrives (or would have, had the connection lived).
        connection: the number of the connection, counted from 0 over the whole network.
        kind: ``syn``, ``syn-ack``, ``ack`` (of the handshake only), ``data``, ``fin``, ``rst``, or
            ``cut`` for the fault, which is noted where and when it happens.
        size_bytes: for data.
    """

    start_ns: int
    end_ns: int
    arrival_ns: int
    connection: int
    from_host: str
    to_host: str
    kind: str
    size_bytes: int


def bursts(log: Iterable[SentAcross]) -> list[SentAcross]:
    """Join data of one connection and direction that left without a pause in between."""
    joined: list[SentAcross] = []
    last: dict[tuple[int, str], int] = {}
    for sent in log:
        key = (sent.connection, sent.from_host)
        at = last.get(key)
        if sent.kind == "data" and at is not None and sent.start_ns <= joined[at].end_ns:
            size_bytes = joined[at].size_bytes + sent.size_bytes
            joined[at] = sent._replace(start_ns=joined[at].start_ns, size_bytes=size_bytes)
            continue
        if sent.kind == "data":
            last[key] = len(joined)
        joined.append(sent)
    return joined


def timeline(log: Iterable[SentAcross]) -> str:
    """Return one line for each entry, for people."""
    return "\n".join(
        f"{to_seconds(sent.start_ns):12.6f} → {to_seconds(sent.arrival_ns):12.6f}  "
        f"#{sent.connection} {sent.from_host} → {sent.to_host}  {sent.kind}"
        + (f" {sent.size_bytes} B" if sent.size_bytes else "")
        for sent in log
    )

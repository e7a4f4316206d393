"""The bounds of everything that could grow, with the arithmetic behind each default."""

from __future__ import annotations

import attrs

from pipegrid.arguments import check_seconds, check_whole

_AT_LEAST_ONE = {"max_connections", "max_requests_in_flight", "max_waiting", "max_attempts"}
"""Without one, nothing would ever be sent."""


@attrs.frozen(kw_only=True)
class Limits:
    """
    Bounds and patience of a connection, or of all connections to one host.

    Attributes:
        max_connections: to one host (scheme, name and port). Pipelining needs one; the others
            are for large answers, which each want a connection for themselves.
        max_requests_in_flight: written and unanswered, on one connection. At 20 ms round trip and
            128 requests a connection carries up to 6400 requests a second.
        max_request_bytes_in_flight: heads and bodies of those. 4 MiB are 4 pieces of 1 MiB, the
            depth at which a storage server's throughput was found to level off. One request
            may be larger, alone.
        response_budget_bytes: answers that may be outstanding before another request is written.
            A server built on Twisted drops the connection when it comes to a GET while its
            own transport is full (64 KiB), so what precedes a request must fit: 60 KB.
        max_response_budget_bytes: what the measured budget of a host that is known to bear pipelining
            may grow to (``http11.host_pool``): 16 MiB are 1.3 Gbit/s at 100 ms. The bytes are on the line,
            not in our memory. No more than ``response_budget_bytes``: that stays as it is.
        assumed_response_bytes: the size of an answer nobody could predict, until the host has shown
            what it answers: 60 KB then allow 15 requests.
        max_waiting: requests that wait for room, per host or per connection; the next
            one fails at once with `TooManyRequests`.
        max_header_bytes: of one answer's head (or trailer). Servers limit requests to 8 to 16 KiB;
            answers with many cookies are longer.
        max_headers: lines of the same.
        discard_limit_bytes: how much of an unwanted answer is read
            to save the connection. A new connection costs 1 to 2 round trips: at 10 MB/s and
            10 ms, 100 to 200 KB; less for a server far away over a thin line.
        timeout_s: silence of the server while it has something to answer and nobody paused it. What waits
            for a host that never answered fails with the first request whose time is over; after twice the
            time if the host has answered before.
        abandoned_timeout_s: the same while the answer that is due is one nobody wants any more.
        unclaimed_timeout_s: how long an answer whose body nobody asked for may hold up those behind it.
        held_up_after_s: how long an answer may lie unclaimed, or its reader pause the connection, before
            new requests go elsewhere. What stands behind an unclaimed one is then asked anew on another
            connection, too: a program may wait for a later answer before it reads an earlier one.
        slow_reader_after_s: how long a reader that has begun may pause before that. Its pauses are ours, not
            the host's fault, and what is asked anew is sent twice.
        connect_timeout_s: from the start of a connection until it can be used, TLS included. When a quarter
            of it is over, a second attempt is made beside the first (``http11.dialer``).
        idle_timeout_s: after this we close an unused connection. Servers do at 60 s (or 75 s), and
            a request that crosses their closing is lost; so we close first.
        continue_timeout_s: patience for "100 Continue" before a body is sent all the same.
        close_timeout_s: patience for the other side while a connection is closed in good order.
        max_attempts: connections that may be lost under the same request before it fails.
        serial_memory_s: how long a host that mishandled pipelining is spoken to one request at a
            time at most before it gets another chance. The first time it is a sixtieth of that, then
            twice as long each time: what looked like it may have been one bad moment.

    Raises:
        UsageError: one of them is no number, or bounds everything away.
    """

    max_connections: int = 4
    max_requests_in_flight: int = 128
    max_request_bytes_in_flight: int = 4 * 2**20
    response_budget_bytes: int = 60_000
    max_response_budget_bytes: int = 16 << 20
    assumed_response_bytes: int = 4_000
    max_waiting: int = 10_000
    max_header_bytes: int = 64 * 2**10
    max_headers: int = 256
    discard_limit_bytes: int = 64 * 2**10
    timeout_s: float = 60.0
    abandoned_timeout_s: float = 5.0
    unclaimed_timeout_s: float = 60.0
    held_up_after_s: float = 0.5
    slow_reader_after_s: float = 30.0
    connect_timeout_s: float = 30.0
    idle_timeout_s: float = 45.0
    continue_timeout_s: float = 1.0
    close_timeout_s: float = 5.0
    max_attempts: int = 3
    serial_memory_s: float = 3600.0

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if name.endswith("_s"):
                check_seconds(value, name)
            else:
                check_whole(value, name, least=1 if name in _AT_LEAST_ONE else 0)

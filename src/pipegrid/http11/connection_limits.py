"""The limits of HTTP connections, with the calculation of each default."""

from __future__ import annotations

import attrs

from pipegrid.argument_checks import check_seconds, check_whole

_AT_LEAST_ONE = {"max_connections", "max_requests_in_flight", "max_waiting", "max_attempts"}
"""Fields that must be at least 1: with 0, no request would ever be sent."""


@attrs.frozen(kw_only=True)
class Limits:
    """
    Limits and timeouts of a connection, or of all connections to one host.

    Attributes:
        max_connections: to one host (scheme, name and port). Pipelining needs one; further connections are
            for large responses, which each need a separate connection.
        max_requests_in_flight: written and unanswered requests on one connection. With a round trip of 20 ms
            and 128 requests, a connection carries up to 6400 requests a second.
        max_request_bytes_in_flight: heads and bodies of written and unanswered requests; 4 MiB are 4 pieces
            of 1 MiB, and more did not raise a storage server's throughput. One larger request may be sent
            alone.
        response_budget_bytes: another request is written only while at most this many bytes of responses are
            outstanding. A server built on Twisted drops the connection if it reads a GET while its own
            transport is full (64 KiB), so the responses to all earlier requests must fit: 60 KB.
        max_response_budget_bytes: the maximum of the measured budget for a host that supports pipelining; 16
            MiB are 1.3 Gbit/s at 100 ms (``http11.host_pool``). The bytes are on the link, not in our memory.
            If this is no more than ``response_budget_bytes``, the budget is not measured.
        assumed_response_bytes: the size of a response without an estimate, until the host has sent some; with
            60 KB, the budget allows 15 requests.
        max_waiting: requests that wait, per host or per connection; the next request fails at once with
            `TooManyRequests`.
        max_header_bytes: of a response's head (or trailer). Servers limit requests to 8 to 16 KiB; responses
            with many cookies are longer.
        max_headers: lines of a response's head (or trailer).
        discard_limit_bytes: how much of an unwanted response is read to keep the connection. A new connection
            costs 1 to 2 round trips: at 10 MB/s and 10 ms, 100 to 200 KB; less for a distant server on a slow
            link.
        timeout_s: silence while a response is outstanding and no reader is paused. Requests that wait for a
            host that never responded fail with the first request that times out; if the host has responded
            before, after twice the time.
        abandoned_timeout_s: silence while an outstanding response is not wanted any more.
        unclaimed_timeout_s: how long a body without a reader may delay the following responses.
        blocked_after_s: how long a response may have no reader, or a paused one, before new requests use
            another connection. The requests after a response without a reader are then also sent again on
            another connection: a program may wait for a later response before it reads an earlier one.
        slow_reader_after_s: how long a reader that has begun may pause after ``blocked_after_s``, before the
            requests after its response are sent again on another connection. The host is not at fault for
            such pauses, and these requests are sent twice.
        connect_timeout_s: until a connection can be used, TLS included. After a quarter of this time a second
            attempt starts (``http11.dialer``).
        idle_timeout_s: an unused connection is closed after this time. Servers close theirs after 60 s (or 75
            s), and a request that crosses their close is lost; so the client closes first.
        continue_timeout_s: a body is sent without "100 Continue" after this time.
        close_timeout_s: how long an orderly close waits for the server's side.
        max_attempts: a request fails when this many connections were lost with it.
        serial_memory_s: the maximum time for which a host that failed at pipelining gets one request at a
            time. The first time it is a sixtieth of this, and it doubles each time, since the first failure
            may have been an accident.

    Raises:
        UsageError: a value is not a number, or does not allow anything.
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
    blocked_after_s: float = 0.5
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

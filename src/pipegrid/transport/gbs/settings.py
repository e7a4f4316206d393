"""Bounds and patience towards one server that is spoken to over HTTPS."""

from __future__ import annotations

import attrs

from pipegrid.http11.limits import Limits


@attrs.frozen(kw_only=True)
class GbsSettings:
    """
    Bounds and patience towards one server.

    Attributes:
        connect_timeout_s: until a connection can be used, TLS included; see ``http11.dialer``.
        timeout_s: silence of the server, while it owes an answer and nobody paused it.
        patience_s: how long uploads that were begun wait for a lost server to come back. A server's
            restart takes a few seconds; a put has its own patience and does not wait without need.
        max_read_connections: beside those that streams take. One does nearly always; others are
            opened when a burst asks for more than one may owe.
        max_streams: at the same time, each with a connection.
        max_waiting: requests that may wait for the uploads' connection, and for the others;
            more fail at once.
        max_upload_bytes_in_flight: written and unanswered. It is the callers' windows that
            should decide, so this is more than any of them; the rest waits here, unsent.
    """

    connect_timeout_s: float = 15.0
    timeout_s: float = 60.0
    patience_s: float = 20.0
    max_read_connections: int = 4
    max_streams: int = 6
    max_waiting: int = 10_000
    max_upload_bytes_in_flight: int = 128 << 20

    def limits(self, max_connections: int) -> Limits:
        """Return the same for ``http11``."""
        return Limits(
            max_connections=max_connections,
            # Bytes are what servers bound, and we with them: of requests there may be many.
            max_requests_in_flight=1000,
            max_request_bytes_in_flight=self.max_upload_bytes_in_flight,
            max_waiting=self.max_waiting,
            # Tahoe-LAFS's servers are built on Twisted: what is owed must fit into their transport.
            max_response_budget_bytes=0,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            close_timeout_s=1.0,
        )

"""The first page: states of servers and transfers, and forms that open, create and store something."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pipegrid.core.text import counted
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.server_states import ServerState
from pipegrid.gateway.transfer_records import TransferRecords
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_ui.page_templates import render_page
from pipegrid.gateway.web_ui.transfers_page import transfer_lines

MOST_TRANSFERS = 20
"""Maximum number of running transfers on the page, and of ended ones."""

MOST_SERVERS = 500


@attrs.frozen
class ServerRow:
    """
    A server, as its row on the page shows it.

    Attributes:
        state: state in one or two words.
        tone: ``good``, ``warn`` or ``bad``.
        reason: why the server is not used, or until when it is certified; or empty.
        rtt_s, available_bytes: round-trip time, and free space; None: not known.
    """

    name: str
    server_id: str
    state: str
    tone: str
    reason: str
    rtt_s: float | None
    available_bytes: int | None
    version: str


@attrs.frozen
class GridHealth:
    """
    Whether uploads and downloads work with the servers as they are now.

    Attributes:
        text: a sentence.
        tone: ``good``, ``warn`` or ``bad``.
        connected, writable, total: number of servers that are reachable, that accept shares, and of all
            servers.
        needed: number of servers that an upload needs.
        available_bytes: space on all servers that accept shares; None: no server reports its space.
    """

    text: str
    tone: str
    connected: int
    writable: int
    total: int
    needed: int
    available_bytes: int | None


def server_row(server: ServerState) -> ServerRow:
    """Return the row of a server."""
    status = server.status
    if status is None:
        state, tone, reason = "connecting", "warn", ""
    elif not status.reachable:
        state, tone, reason = "not reachable", "bad", status.reason or ""
    elif not status.writable:
        state, tone = "takes no shares", "warn"
        reason = status.no_uploads or "It has no space left."
    else:
        state, tone, reason = "connected", "good", ""
        if status.certified_until is not None:
            reason = f"certified by {status.certified_by} until {status.certified_until[:10]}"
    return ServerRow(
        server.identity.nickname or server.identity.server_id,
        server.identity.server_id,
        state,
        tone,
        reason,
        None if status is None else status.rtt_s,
        None if status is None else status.available_bytes,
        "" if status is None else status.version or "",
    )


def grid_health(servers: Sequence[ServerState], needed: int) -> GridHealth:
    """
    Return the health of the grid with these servers.

    Args:
        needed: number of servers that an upload needs.
    """
    answered = [one.status for one in servers if one.status is not None]
    connected = sum(status.reachable for status in answered)
    writable = [status for status in answered if status.writable]
    space = [each.available_bytes for each in writable if each.available_bytes is not None]
    if not servers:
        text, tone = (
            "No servers are known. The configuration names none, or none was announced yet.",
            "bad",
        )
    elif len(writable) < needed:
        count = counted(len(writable), "server")
        text = f"Uploads fail at present: {count} can take shares, and {needed} are needed."
        tone = "bad"
    elif connected < len(servers):
        text = f"{counted(len(servers) - connected, 'server')} cannot be reached. Uploads and downloads work."
        tone = "warn"
    else:
        text, tone = "All servers are connected.", "good"
    return GridHealth(
        text, tone, connected, len(writable), len(servers), needed, sum(space) if space else None
    )


def overview_page(
    call: ApiRequest, servers: Sequence[ServerState], records: TransferRecords
) -> HttpResponse:
    """Return the page of ``/``: states of servers and transfers, and forms."""
    active = list(records.active)
    values = {
        "title": "Grid",
        "here": "/",
        "health": grid_health(servers, call.grid.config.happy),
        "servers": [server_row(server) for server in servers[:MOST_SERVERS]],
        "running": transfer_lines(active[:MOST_TRANSFERS]),
        "running_count": len(active),
        "recent": transfer_lines(records.recent[:MOST_TRANSFERS]),
    }
    return render_page("overview.html", values)

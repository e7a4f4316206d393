"""Status of the gateway: servers, transfers and statistics, as JSON and as pages."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.server_states import ServerState
from pipegrid.gateway.transfer_records import TransferKind, TransferRecord, TransferRecords
from pipegrid.gateway.web_api.check_json import Json, storage_index_text
from pipegrid.gateway.web_ui.page_templates import notice_page
from pipegrid.grid.introducer_client import IntroducerStatus

# Names and meanings are those of Tahoe-LAFS: ``tahoe status``, magic-folder and Gridsync read them. They
# contain no capability: objects are identified by storage index, which servers know anyway.

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_COUNTERS: tuple[tuple[TransferKind, str, str], ...] = (
    ("upload", "uploader.files_uploaded", "uploader.bytes_uploaded"),
    ("download", "downloader.files_downloaded", "downloader.bytes_downloaded"),
    ("publish", "mutable.files_published", "mutable.bytes_published"),
    ("retrieve", "mutable.files_retrieved", "mutable.bytes_retrieved"),
)

_PAGE_NAMES: dict[TransferKind, str] = {
    "upload": "up",
    "download": "down",
    "publish": "publish",
    "retrieve": "retrieve",
}
_PAGE = re.compile(r"(up|down|publish|retrieve)-([0-9]{1,15})\Z")


def welcome_json(servers: Sequence[ServerState], introducers: Sequence[IntroducerStatus]) -> Json:
    """Return ``/?t=json``: introducers, and all known servers."""
    return {
        "introducers": {"statuses": [_introducer_text(one) for one in introducers]},
        "servers": [_server_json(server) for server in servers],
    }


def _introducer_text(one: IntroducerStatus) -> str:
    if one.connected:
        return f"Connected to {one.address}"
    return f"Not reachable: {one.reason}" if one.reason else "Trying to connect"


def _server_json(server: ServerState) -> Json:
    status = server.status
    return {
        "nodeid": server.identity.server_id,
        "connection_status": server.connection_text,
        "available_space": None if status is None else status.available_bytes,
        "nickname": server.identity.nickname,
        "version": None if status is None else status.version,
        "last_received_data": server.heard_s,
    }


def transfers_json(records: TransferRecords) -> Json:
    """Return ``/status``: running transfers, and the newest that have ended."""
    return {
        "active": [transfer_json(record) for record in records.active],
        "recent": [transfer_json(record) for record in records.recent],
    }


def transfer_json(record: TransferRecord) -> Json:
    """Return the fields of one transfer."""
    said: Json = {
        "type": record.kind,
        "storage-index-string": storage_index_text(record.cap),
        "total-size": record.size or 0,
        "status": _state_text(record),
    }
    if record.kind == "upload":
        hashed = 1.0 if record.done else record.fraction
        said["progress-hash"] = hashed
        said["progress-ciphertext"] = said["progress-encode-push"] = record.fraction
    elif record.kind == "download":
        said["progress"] = record.fraction
    return said


def _state_text(record: TransferRecord) -> str:
    if record.state == "running":
        return f"Running ({round(100 * record.fraction)} %)"
    return {"finished": "Finished", "failed": "Failed", "cancelled": "Cancelled"}[record.state]


def statistics_json(records: TransferRecords, uptime_s: float) -> Json:
    """Return ``/statistics``: counters, without zero ones, and other figures."""
    counters: Json = {}
    for kind, files, amount in _COUNTERS:
        if count := records.ended[kind, "finished"]:
            counters[files], counters[amount] = count, records.bytes[kind]
    return {
        "counters": counters,
        "stats": {"node.uptime": float(uptime_s), "cpu_monitor.total": time.process_time()},
    }


def openmetrics_text(statistics: Json) -> str:
    """Return statistics as Tahoe-LAFS does for Prometheus."""
    lines = [
        f"tahoe_{group}_{name.replace('.', '_')} {value}"
        for group in ("counters", "stats")
        for name, value in sorted(statistics[group].items())
    ]
    return "\n".join([*sorted(lines), "# EOF", ""])


def find_transfer(records: TransferRecords, name: str) -> TransferRecord | None:
    """Return the transfer with a page's name, such as ``up-3``; None if there is none."""
    found = _PAGE.match(name)
    if found is None:
        return None
    [kind] = [kind for kind, short in _PAGE_NAMES.items() if short == found[1]]
    return records.find(kind, int(found[2]))


def statistics_page(statistics: Json) -> HttpResponse:
    """Return a page with all figures."""
    figures: dict[str, Any] = {**statistics["counters"], **statistics["stats"]}
    return notice_page("Statistics", [f"{name}: {value}" for name, value in figures.items()])


def events_json(record: TransferRecord) -> str:
    """Return when a transfer began and ended."""
    said = {"started": record.started_s, "ended": record.ended_s, "state": record.state}
    return json.dumps(said, indent=1) + "\n"

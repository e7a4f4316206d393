"""
Requests for the gateway's own pages, such as ``/``, ``/status``, ``/statistics`` and ``/metrics``; and the
states of servers and transfers as JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import attrs

from pipegrid.gateway.http_response import HttpResponse, WebError, json_text
from pipegrid.gateway.server_states import ServerState, ServerStates
from pipegrid.gateway.transfer_records import TransferKind, TransferRecord, TransferRecords
from pipegrid.gateway.web_api.api_request import ApiRequest, method_not_allowed
from pipegrid.gateway.web_api.check_json import Json, storage_index_text
from pipegrid.gateway.web_api.gateway_metrics import CONTENT_TYPE, GatewayCollector, metrics_text
from pipegrid.gateway.web_ui.overview_page import overview_page
from pipegrid.gateway.web_ui.page_templates import notice_page
from pipegrid.gateway.web_ui.transfers_page import KIND_NAMES, transfer_page, transfers_page
from pipegrid.grid.introducer_client import IntroducerStatus

# Names and meanings of the fields are Tahoe-LAFS's, since ``tahoe status``, magic-folder and Gridsync read
# them. The JSON contains no caps; objects have their storage index, which servers know anyway.

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_COUNTERS: tuple[tuple[TransferKind, str, str], ...] = (
    ("upload", "uploader.files_uploaded", "uploader.bytes_uploaded"),
    ("download", "downloader.files_downloaded", "downloader.bytes_downloaded"),
    ("publish", "mutable.files_published", "mutable.bytes_published"),
    ("retrieve", "mutable.files_retrieved", "mutable.bytes_retrieved"),
)

_PAGE = re.compile(r"(up|down|publish|retrieve)-([0-9]{1,15})\Z")


def welcome_json(servers: Sequence[ServerState], introducers: Sequence[IntroducerStatus]) -> Json:
    """Return the JSON of ``/?t=json``: introducers and all known servers."""
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
    """Return the JSON of ``/status``: running transfers, and the newest ended ones."""
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
        said["progress-hash"] = 1.0 if record.done else record.fraction
        said["progress-ciphertext"] = said["progress-encode-push"] = record.fraction
    elif record.kind == "download":
        said["progress"] = record.fraction
    return said


def _state_text(record: TransferRecord) -> str:
    if record.state == "running":
        return f"Running ({round(100 * record.fraction)} %)"
    return {"finished": "Finished", "failed": "Failed", "cancelled": "Cancelled"}[record.state]


def statistics_json(records: TransferRecords, uptime_s: float) -> Json:
    """Return the JSON of ``/statistics``: counters that are not zero, uptime and CPU time."""
    counters: Json = {}
    for kind, files, amount in _COUNTERS:
        if count := records.ended[kind, "finished"]:
            counters[files], counters[amount] = count, records.bytes[kind]
    return {
        "counters": counters,
        "stats": {"node.uptime": float(uptime_s), "cpu_monitor.total": time.process_time()},
    }


def openmetrics_text(statistics: Json) -> str:
    """Return statistics in Prometheus's format, with the names that Tahoe-LAFS uses."""
    lines = [
        f"tahoe_{group}_{name.replace('.', '_')} {value}"
        for group in ("counters", "stats")
        for name, value in sorted(statistics[group].items())
    ]
    return "\n".join([*sorted(lines), "# EOF", ""])


def find_transfer(records: TransferRecords, name: str) -> TransferRecord | None:
    """Return the transfer whose page has this name, such as ``up-3``; None if there is none."""
    found = _PAGE.match(name)
    if found is None:
        return None
    kind = next(kind for kind, (short, _) in KIND_NAMES.items() if short == found[1])
    return records.find(kind, int(found[2]))


def statistics_page(statistics: Json) -> HttpResponse:
    """Return a page that lists all statistics."""
    figures = {**statistics["counters"], **statistics["stats"]}
    return notice_page("Statistics", [f"{name}: {value}" for name, value in figures.items()])


def events_json(record: TransferRecord) -> str:
    """Return JSON with the times when a transfer began and ended, and its state."""
    return json_text({"started": record.started_s, "ended": record.ended_s, "state": record.state})


JSON = "application/json"


@attrs.frozen(eq=False)
class GatewayState:
    """
    What the gateway's own pages show.

    Attributes:
        started_s: when the gateway started, by the clock.
    """

    records: TransferRecords
    servers: ServerStates
    collector: GatewayCollector
    started_s: float


def _kind(call: ApiRequest, *kinds: str) -> str:
    """
    Return the argument ``t``, if it is one of ``kinds`` or empty.

    Raises:
        WebError: the path does not support this ``t``, or the method.
    """
    if call.method not in ("GET", "POST", "PUT"):
        raise method_not_allowed(call, "GET, HEAD, POST, PUT")
    kind = call.arguments.operation
    if kind not in ("", *kinds):
        raise WebError(400, f"the argument t is {' or '.join(kinds)} here, or left out")
    return kind


async def answer_home(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/``."""
    is_json = _kind(call, "json") == "json"
    servers = await state.servers.current()
    if is_json:
        said = welcome_json(servers, call.grid.introducers)
        return HttpResponse(json_text(said), content_type=f"{JSON}; charset=utf-8")
    return overview_page(call, servers, state.records)


async def answer_status(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/status`` or a path below it."""
    is_json = _kind(call, "json") == "json"
    names = [name for name in call.names[1:] if name]
    if names:
        return _transfer(state, names)
    if is_json:
        return HttpResponse(json_text(transfers_json(state.records)), content_type=JSON)
    return transfers_page(state.records)


def _transfer(state: GatewayState, names: list[str]) -> HttpResponse:
    record = find_transfer(state.records, names[0])
    if record is None or names[1:] not in ([], ["event_json"]):
        raise WebError(404, "no such transfer runs, or has ended lately")
    if names[1:]:
        return HttpResponse(events_json(record), content_type=JSON)
    return transfer_page(record)


async def answer_statistics(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/statistics``."""
    kind = _kind(call, "json", "openmetrics")
    said = statistics_json(state.records, call.grid.clock.seconds() - state.started_s)
    if kind == "json":
        return HttpResponse(json_text(said), content_type="text/plain")
    if kind == "openmetrics":
        return HttpResponse(openmetrics_text(said), content_type=OPENMETRICS)
    return statistics_page(said)


async def answer_metrics(state: GatewayState, call: ApiRequest) -> HttpResponse:
    if call.method != "GET":
        raise method_not_allowed(call, "GET, HEAD")
    await state.servers.current()
    return HttpResponse(metrics_text(state.collector), content_type=CONTENT_TYPE)


async def answer_helper_status(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/helper_status``: this gateway has no upload helper."""
    if _kind(call, "json"):
        return HttpResponse("{}\n", content_type="text/plain")
    return notice_page("Helper", ["This gateway has no upload helper."])


async def answer_storage(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/storage``: this process is not a storage server."""
    if _kind(call, "json"):
        raise WebError(
            404, "this process is not a storage server, so it has no shares to report on"
        )
    return notice_page("Storage", ["This process is not a storage server."])


async def answer_report(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/report_incident``: the gateway keeps no reports and refers to its log."""
    if call.method != "POST":
        raise WebError(400, "reports are sent with POST")
    return HttpResponse("The gateway keeps no reports; see its log.\n")


STATUS_ANSWERS: Mapping[
    bytes, Callable[[GatewayState, ApiRequest], Coroutine[Any, Any, HttpResponse]]
] = {
    b"": answer_home,
    b"status": answer_status,
    b"statistics": answer_statistics,
    b"metrics": answer_metrics,
    b"helper_status": answer_helper_status,
    b"storage": answer_storage,
    b"report_incident": answer_report,
}
"""Functions that answer requests, by the first part of the path."""

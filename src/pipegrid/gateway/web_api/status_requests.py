"""
Requests for the gateway's own pages: ``/``, ``/status``, ``/statistics``, ``/metrics`` and similar ones.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.gateway.http_response import HttpResponse, json_text
from pipegrid.gateway.server_states import ServerStates
from pipegrid.gateway.transfer_records import TransferRecords
from pipegrid.gateway.web_api.api_request import ApiRequest, method_not_allowed
from pipegrid.gateway.web_api.gateway_metrics import CONTENT_TYPE, GatewayCollector, metrics_text
from pipegrid.gateway.web_api.status_json import (
    OPENMETRICS,
    events_json,
    find_transfer,
    openmetrics_text,
    statistics_json,
    statistics_page,
    transfers_json,
    welcome_json,
)
from pipegrid.gateway.web_api.web_errors import WebError
from pipegrid.gateway.web_ui.overview_page import overview_page
from pipegrid.gateway.web_ui.page_templates import notice_page
from pipegrid.gateway.web_ui.transfers_page import transfer_page, transfers_page

JSON = "application/json"


@attrs.frozen(eq=False)
class GatewayState:
    """
    The state of the gateway that its pages show.

    Attributes:
        started_s: when it started, by the clock.
    """

    records: TransferRecords
    servers: ServerStates
    collector: GatewayCollector
    clock: IReactorTime
    started_s: float


StatusAnswerer = Callable[[GatewayState, ApiRequest], Coroutine[Any, Any, HttpResponse]]


def _kind(call: ApiRequest, *kinds: str) -> str:
    """
    Return the argument ``t``.

    Raises:
        WebError: this path does not support it, or not the method.
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
    """Answer a request for ``/status`` or anything below it."""
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
    said = statistics_json(state.records, state.clock.seconds() - state.started_s)
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
    """Answer a request for ``/helper_status``: a gateway has no upload helper."""
    if _kind(call, "json"):
        return HttpResponse("{}\n", content_type="text/plain")
    return notice_page("Helper", ["This gateway has no upload helper."])


async def answer_storage(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request for ``/storage``: a gateway has no shares."""
    if _kind(call, "json"):
        raise WebError(
            404, "this process is not a storage server, so it has no shares to report on"
        )
    return notice_page("Storage", ["This process is not a storage server."])


async def answer_report(state: GatewayState, call: ApiRequest) -> HttpResponse:
    """Answer a request for ``/report_incident``: reports go only to the log."""
    if call.method != "POST":
        raise WebError(400, "reports are sent with POST")
    return HttpResponse("The gateway keeps no reports; see its log.\n")


STATUS_ANSWERS: Mapping[bytes, StatusAnswerer] = {
    b"status": answer_status,
    b"statistics": answer_statistics,
    b"metrics": answer_metrics,
    b"helper_status": answer_helper_status,
    b"storage": answer_storage,
    b"report_incident": answer_report,
}
"""By the first part of the path."""

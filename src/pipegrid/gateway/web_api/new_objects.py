"""Requests to ``/uri`` itself: new files and directories that no directory links to."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

from pipegrid.core.caps import Cap
from pipegrid.gateway.body_spool import BodySpool
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.web_api.api_request import ApiRequest, method_not_allowed
from pipegrid.gateway.web_api.web_errors import WebError


async def answer_unlinked(call: ApiRequest) -> HttpResponse | None:
    """Answer a request to ``/uri``."""
    operation = call.arguments.operation
    if call.method == "PUT" and operation == "":
        cap = await store_file(call, call.body)
        return HttpResponse(str(cap))
    if call.method in ("GET", "PUT", "POST"):
        raise WebError(400, "the argument t is not one that /uri knows")
    raise method_not_allowed(call, "GET, HEAD, PUT, POST")


async def store_file(call: ApiRequest, body: BodySpool) -> Cap:
    """Store a body as an immutable file; returns its cap."""
    source = body.source()
    closes: Any = nullcontext() if isinstance(source, bytes) else closing(source)
    with closes:
        result = await call.grid.put(source)
    return result.cap

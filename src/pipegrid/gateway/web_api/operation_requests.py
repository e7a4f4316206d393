"""
Requests for checks, streams and operations: ``POST ?t=check``, ``t=stream-*``, ``t=start-*``, and
``/operations``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from pipegrid.core.caps import DirectoryCap, UnknownCap
from pipegrid.errors import PipegridError
from pipegrid.gateway.http_response import (
    HttpResponse,
    ResponseStream,
    WebError,
    json_text,
    redirect,
)
from pipegrid.gateway.web_api.api_request import (
    ApiRequest,
    Handler,
    method_not_allowed,
    when_done,
)
from pipegrid.gateway.web_api.deep_operations import (
    OPERATIONS,
    DeepOperation,
    check_one,
    error_name,
    stream_deep_check,
    stream_manifest,
)
from pipegrid.gateway.web_api.operation_handles import (
    OperationHandles,
    check_handle,
)
from pipegrid.gateway.web_api.path_lookup import FoundObject, unknown_cap
from pipegrid.gateway.web_ui.check_page import cancelled_page, object_check_page, operation_page
from pipegrid.transfer.upkeep import UpkeepRequest

TEXT_OR_JSON = "text/plain"


def operation_posts(handles: OperationHandles) -> Mapping[str, Handler]:
    """Return the handlers of checks, streams and operations on existing objects, by ``t``."""
    starts = {kind: partial(_start, handles, kind) for kind in OPERATIONS}
    streams = {"stream-manifest": _stream_manifest, "stream-deep-check": _stream_deep_check}
    return {"check": _check, **streams, **starts}


def _todo(call: ApiRequest) -> UpkeepRequest:
    arguments = call.arguments
    return UpkeepRequest(
        verify=arguments.flag("verify"),
        add_lease=arguments.flag("add-lease"),
        repair=arguments.flag("repair"),
    )


async def _check(call: ApiRequest, found: FoundObject) -> HttpResponse:
    todo = _todo(call)
    if isinstance(found.cap, UnknownCap):
        raise unknown_cap(found.cap)
    if found.cap is None:
        raise WebError(400, "no cap of this object is known, so it cannot be checked")
    said = await check_one(call.grid, found.cap, todo)
    if call.arguments.text("output").lower() == "json":
        return HttpResponse(json_text(said), content_type=TEXT_OR_JSON)
    if call.arguments.get("when_done"):
        return when_done(call, "")
    return object_check_page(call.http.path, found.is_directory, said)


def _root(call: ApiRequest, found: FoundObject) -> DirectoryCap:
    """
    Return the cap of the directory at which an operation begins.

    Raises:
        WebError: the object is not a directory that can be listed.
    """
    if not found.is_directory:
        operation = call.arguments.operation
        raise WebError(
            400, f"POST to file: bad t={operation}; it is for directories that can be listed"
        )
    return found.directory


# Streams.


async def _stream_manifest(call: ApiRequest, found: FoundObject) -> None:
    root = _root(call, found)
    await _stream(call, root, lambda stream: stream_manifest(call.grid, root, stream))


async def _stream_deep_check(call: ApiRequest, found: FoundObject) -> None:
    root, todo = _root(call, found), _todo(call)
    await _stream(call, root, lambda stream: stream_deep_check(call.grid, root, todo, stream))


async def _stream(call: ApiRequest, root: DirectoryCap, work: Any) -> None:
    stream = ResponseStream(call.http)
    call.http.setHeader("content-type", TEXT_OR_JSON)
    try:
        await work(stream)
    except PipegridError as error:
        if not stream.has_begun:
            raise
        stream.write(f"ERROR: {error_name(error, root)}({error})\n".encode())
    stream.finish()


# Operations.


async def _start(
    handles: OperationHandles, kind: str, call: ApiRequest, found: FoundObject
) -> HttpResponse:
    root, todo = _root(call, found), _todo(call)
    handle = call.arguments.text("ophandle")
    output = call.arguments.text("output")
    check_handle(handle)
    handles.start(handle, OPERATIONS[kind](root, todo), _retain_s(call))
    query = f"?output={quote(output, safe='')}" if output else ""
    return redirect(f"/operations/{quote(handle, safe='')}{query}")


def _retain_s(call: ApiRequest) -> float | None:
    given = call.arguments.get("retain-for")
    if given is None:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 12:
        raise WebError(400, "the argument retain-for must be a whole number of seconds")
    return float(given)


async def answer_operation(handles: OperationHandles, call: ApiRequest) -> HttpResponse:
    """Answer a request to ``/operations`` or a path below it."""
    names = [name for name in call.names[1:] if name]
    if call.method not in ("GET", "POST"):
        raise method_not_allowed(call, "GET, HEAD, POST")
    if not names or len(names) > 2:
        raise WebError(404, "there is nothing here; request /operations/HANDLE")
    operation = handles.find(names[0])
    kind = call.arguments.operation or "status"
    if kind not in ("status", "cancel") or (kind == "cancel" and call.method != "POST"):
        raise WebError(
            400, "request the state with GET and t=status, or cancel with POST and t=cancel"
        )
    output = _output(call, operation)
    retain_s = _retain_s(call)
    release = call.arguments.flag("release-after-complete")
    response = _state(names[0], operation, output, names[1:])
    if kind == "cancel":
        handles.cancel(names[0])
        if output == "html":
            response = cancelled_page(operation)
    else:
        handles.answered(names[0], retain_s=retain_s, release=release)
    if operation.error is not None:
        raise operation.error
    return response


def _output(call: ApiRequest, operation: DeepOperation) -> str:
    output = call.arguments.text("output").lower() or "html"
    if output not in ("html", "json", "text"):
        raise WebError(400, "Unknown output: it is html, json or text")
    return "json" if operation.json_only else output


def _state(handle: str, operation: DeepOperation, output: str, part: list[str]) -> HttpResponse:
    if operation.error is not None:
        return HttpResponse()
    if part:
        checked = operation.part(part[0])
        if checked is None:
            raise WebError(404, "this operation has no check of an object with that storage index")
        if output == "html":
            return object_check_page(None, False, checked)
        return HttpResponse(json_text(checked), content_type=TEXT_OR_JSON)
    if output == "json":
        return HttpResponse(json_text(operation.json()), content_type=TEXT_OR_JSON)
    if output == "text":
        return HttpResponse(operation.text(), content_type=TEXT_OR_JSON)
    return operation_page(handle, operation)

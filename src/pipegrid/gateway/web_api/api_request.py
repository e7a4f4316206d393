"""A parsed request of the web API, and functions that its handlers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.web.http_headers import Headers
from twisted.web.resource import Resource

from pipegrid.core.caps import Cap
from pipegrid.gateway.body_spool import BodySpool
from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.http_response import HttpResponse, WebError, redirect, respond
from pipegrid.gateway.web_api.path_lookup import FoundObject
from pipegrid.gateway.web_api.web_arguments import (
    Arguments,
    decode_path,
    most_body_bytes,
    read_arguments,
)
from pipegrid.gateway.web_ui.page_templates import problem_response
from pipegrid.tree.tree_grid import Grid


@attrs.frozen(eq=False)
class ApiRequest:
    """
    One request of the web API.

    Attributes:
        http: twisted.web's request; a handler that sends its response in pieces writes to this and finishes
            it.
        method: HTTP method; ``GET`` for a HEAD request, see ``is_head``.
        names: the decoded parts of the path; the first is ``uri`` or similar.
        stored: fires with the cap of the body, which is stored while the path is followed; None: not stored
            early.
    """

    http: Any
    grid: Grid
    settings: GatewaySettings
    method: str
    names: list[str]
    arguments: Arguments
    body: BodySpool
    is_head: bool = False
    stored: Deferred[Cap] | None = None

    def header(self, name: str) -> str | None:
        """Return the first value of a header; None if the request does not have the header."""
        values = self.http.requestHeaders.getRawHeaders(name)
        return values[0] if values else None


Handler = Callable[[ApiRequest, FoundObject], Awaitable[HttpResponse | None]]
"""Handles a request for an object; returns the response, or None if the handler has finished it itself."""

Answerer = Callable[[ApiRequest], Coroutine[Any, Any, HttpResponse | None]]
"""Handles a request that is not for an object; returns what a ``Handler`` returns."""


def api_request(http: Any, grid: Grid, settings: GatewaySettings) -> ApiRequest:
    """
    Return a parsed request.

    Raises:
        WebError, BodyRefused: the request is malformed.
    """
    method = http.method.decode("ascii", "replace")
    query = http.uri.partition(b"?")[2]
    content_type = (http.requestHeaders.getRawHeaders("content-type") or [""])[0]
    arguments = read_arguments(
        http.method, query, content_type, http.body, settings.limits.form_bytes
    )
    names = decode_path(http.path)
    is_head = method == "HEAD"
    return ApiRequest(
        http, grid, settings, "GET" if is_head else method, names, arguments, http.body, is_head
    )


def method_not_allowed(call: ApiRequest, allowed: str) -> WebError:
    """Return the error for a method that is not supported at a path."""
    if call.method in ("GET", "POST"):
        return WebError(405, f"the method {call.method} is not allowed here", {"Allow": allowed})
    return WebError(501, f"the method {call.method[:20]} is not supported here")


class ApiResource(Resource):
    """
    A resource that answers all requests below a path with one function.

    Args:
        answer: the function.
    """

    isLeaf = True

    def __init__(self, grid: Grid, settings: GatewaySettings, answer: Answerer) -> None:
        super().__init__()
        self._grid = grid
        self._settings = settings
        self._answer = answer

    def look_at_head(
        self, method: bytes, path: bytes, headers: Headers, length: int | None, body: BodySpool
    ) -> None:
        """See ``LooksAtHeads``; limits the size of bodies that must fit into memory."""
        content_type = (headers.getRawHeaders("content-type") or [""])[0]
        most_bytes = most_body_bytes(method, path, content_type, self._settings.limits)
        if most_bytes is not None:
            body.allow(most_bytes)

    def render(self, request: Any) -> int:
        """Answer a request; see ``IResource``."""

        async def work() -> HttpResponse | None:
            return await self._answer(api_request(request, self._grid, self._settings))

        return respond(request, work(), self._grid.clock, problem_response)


def when_done(call: ApiRequest, text: str) -> HttpResponse:
    """
    Return the response after a success: a redirect to the argument ``when_done``, if given, otherwise the
    text.
    """
    target = call.arguments.get("when_done")
    if target:
        return redirect(local_target(target))
    return HttpResponse(text)


def local_target(target: str) -> str:
    """
    Return the target of a redirect, if it is on the gateway.

    Raises:
        WebError: it is on another site; a page could abuse the gateway's address to lead there.
    """
    if target.startswith(("//", "/\\")) or "\\" in target or ":" in target.partition("/")[0]:
        raise WebError(400, "when_done leads to another site; give a path of this gateway")
    return target

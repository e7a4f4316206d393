"""``/uri``, ``/cap``, ``/file`` and ``/named``: what a request asks for, and who does it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.web_api.api_request import (
    ApiRequest,
    ApiResource,
    Handler,
    method_not_allowed,
)
from pipegrid.gateway.web_api.file_requests import download
from pipegrid.gateway.web_api.new_objects import answer_unlinked
from pipegrid.gateway.web_api.path_lookup import find
from pipegrid.gateway.web_api.web_errors import no_such_child
from pipegrid.tree.public_grid import Grid


def object_resource(
    grid: Grid, settings: GatewaySettings, posts: Mapping[str, Handler]
) -> ApiResource:
    """
    Return the resource of ``/uri`` and ``/cap``.

    Args:
        posts: handlers of ``POST ?t=...`` for objects that exist, by ``t``.
    """
    return ApiResource(grid, settings, partial(answer_object, posts))


async def answer_object(posts: Mapping[str, Handler], call: ApiRequest) -> HttpResponse | None:
    """Answer a request to ``/uri`` and all below it."""
    if len(call.names) < 2:
        return await answer_unlinked(call)
    found = await find(call.grid, call.names[1], call.names[2:])
    if not found.exists:
        raise no_such_child(found.missing[0])
    if call.method == "POST" and call.arguments.operation in posts:
        return await posts[call.arguments.operation](call, found)
    if call.method == "GET":
        return await download(call, found.cap, found.name)
    raise method_not_allowed(call, "GET, HEAD, PUT, POST, DELETE")

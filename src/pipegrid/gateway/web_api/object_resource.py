"""The resources ``/uri``, ``/cap``, ``/file`` and ``/named``: they choose the handler of each request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from urllib.parse import urlencode

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.http_response import HttpResponse, WebError, no_such_child, redirect
from pipegrid.gateway.web_api.api_request import (
    ApiRequest,
    ApiResource,
    Handler,
    method_not_allowed,
)
from pipegrid.gateway.web_api.directory_requests import (
    delete_link,
    get_directory,
    link_cap,
    make_directory,
    makes_directory,
    relink,
    set_children,
    unlink,
    upload,
)
from pipegrid.gateway.web_api.file_requests import get_file, links_cap, put_object
from pipegrid.gateway.web_api.new_objects import (
    MKDIRS,
    answer_unlinked,
    may_be_stored_early,
    store_file,
)
from pipegrid.gateway.web_api.path_lookup import (
    FileOnPath,
    FoundObject,
    find,
    find_place,
    find_unless_new,
)
from pipegrid.reactor.deferreds import start_cancellable
from pipegrid.tree.tree_grid import Grid

METHODS = "GET, HEAD, PUT, POST, DELETE"

_POSTS: Mapping[str, Handler] = {
    **dict.fromkeys(MKDIRS, make_directory),
    "upload": upload,
    "uri": link_cap,
    "unlink": unlink,
    "delete": unlink,
    "rename": relink,
    "relink": relink,
    "set_children": set_children,
    "set-children": set_children,
}
"""Handlers of ``POST ?t=...`` for existing directories, by ``t``."""

_OF_FILES = frozenset({"upload", "check"})
"""Values of ``t`` that a POST to a file supports, too."""


def object_resource(
    grid: Grid, settings: GatewaySettings, posts: Mapping[str, Handler]
) -> ApiResource:
    """
    Return the resource of ``/uri`` and ``/cap``.

    Args:
        posts: additional handlers of ``POST ?t=...`` for existing objects, by ``t``.
    """
    return ApiResource(grid, settings, partial(answer_object, {**_POSTS, **posts}))


async def answer_object(posts: Mapping[str, Handler], call: ApiRequest) -> HttpResponse | None:
    """Answer a request to ``/uri`` or a path below it."""
    if len(call.names) < 2:
        return await answer_unlinked(call)
    if call.names[1:] == [""]:
        query = urlencode(call.arguments.values)
        return redirect("/uri" + (f"?{query}" if query else ""))
    if call.method not in ("GET", "PUT", "POST", "DELETE"):
        raise method_not_allowed(call, METHODS)
    if not may_be_stored_early(call):
        return await _answer_at_path(posts, call)
    storing = start_cancellable(store_file(call, call.body), call.grid.clock)
    try:
        return await _answer_at_path(posts, attrs.evolve(call, stored=storing))
    finally:
        storing.addErrback(lambda _: None)  # the body's upload failed, and its cap is not needed
        storing.cancel()


async def _answer_at_path(posts: Mapping[str, Handler], call: ApiRequest) -> HttpResponse | None:
    follow = find_place if links_cap(call) else find_unless_new if makes_directory(call) else find
    try:
        found = await follow(call.grid, call.names[1], call.names[2:])
    except FileOnPath as error:
        if call.method in ("PUT", "POST"):
            raise WebError(409, str(error)) from None
        raise
    if not found.exists:
        return await _answer_missing(call, found)
    if call.method == "GET":
        if found.is_directory:
            return await get_directory(call, found)
        return await get_file(call, found)
    if call.method == "PUT":
        return await _put(call, found)
    if call.method == "DELETE":
        return await delete_link(call, found)
    return await _post(posts, call, found)


async def _answer_missing(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    operation = call.arguments.operation
    if call.method == "PUT" and operation in ("", "uri"):
        return await put_object(call, found)
    if (call.method == "PUT" and operation == "mkdir") or (
        call.method == "POST" and operation in MKDIRS
    ):
        return await make_directory(call, found)
    if call.method == "POST" and operation == "upload":
        return await upload(call, found)
    raise no_such_child(found.missing[0])


async def _put(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    operation = call.arguments.operation
    if operation == "mkdir" and isinstance(found.cap, DirectoryCap):
        return await make_directory(call, found)
    if operation not in ("", "uri"):
        raise WebError(400, "PUT does not support this t here")
    return await put_object(call, found)


async def _post(
    posts: Mapping[str, Handler], call: ApiRequest, found: FoundObject
) -> HttpResponse | None:
    operation = call.arguments.operation
    handler = posts.get(operation)
    if handler is None or not (found.is_directory or operation in _OF_FILES):
        raise WebError(400, "POST does not support this t here")
    return await handler(call, found)


async def answer_named(call: ApiRequest) -> HttpResponse | None:
    """
    Answer a request below ``/named`` or ``/file``; the last name in the path only sets file name and media
    type.
    """
    if len(call.names) < 2 or not call.names[1]:
        raise WebError(404, "the path has no capability; it is /named/CAP/NAME")
    if call.method != "GET":
        raise WebError(400, "files below /named can only be read")
    found = await find(call.grid, call.names[1], [])
    if isinstance(found.cap, DirectoryCap):
        raise WebError(400, "below /named there are files only, and this is a directory")
    name = call.names[-1] if len(call.names) > 2 else ""
    return await get_file(call, FoundObject(found.cap, name=name))

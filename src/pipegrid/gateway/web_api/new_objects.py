"""Requests to ``/uri`` itself, and request bodies that become new files or directories."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote, urlencode

from pipegrid.core.caps import Cap, UnknownCap
from pipegrid.core.packed_directory import directory_cap, pack_immutable
from pipegrid.gateway.body_spool import IN_MEMORY_BYTES, BodySpool
from pipegrid.gateway.http_response import HttpResponse, WebError, redirect
from pipegrid.gateway.web_api.api_request import (
    ApiRequest,
    local_target,
    method_not_allowed,
)
from pipegrid.gateway.web_api.children_json import links_of, packed_children, parse_children
from pipegrid.gateway.web_api.path_lookup import cap_of
from pipegrid.gateway.web_ui.page_paths import opened_url
from pipegrid.gateway.web_ui.page_templates import render_page
from pipegrid.tree.directory import create_directory

MKDIRS = ("mkdir", "mkdir-with-children", "mkdir-immutable")
"""Values of ``t`` that create a directory."""


async def answer_unlinked(call: ApiRequest) -> HttpResponse | None:
    """Answer a request to ``/uri`` itself."""
    operation = call.arguments.operation
    if call.method == "GET":
        return _redirect_to_cap(call)
    if call.method == "PUT" and operation == "":
        return HttpResponse(str(await store_file(call, call.body)))
    if call.method == "POST" and operation in ("", "upload"):
        return await _upload(call)
    if operation in MKDIRS and (call.method == "POST" or operation == "mkdir"):
        return await _make_directory(call)
    if call.method in ("PUT", "POST"):
        raise WebError(400, "/uri does not support this argument t")
    raise method_not_allowed(call, "GET, HEAD, PUT, POST")


def _redirect_to_cap(call: ApiRequest) -> HttpResponse:
    text = call.arguments.get("uri")
    if text is None:
        raise WebError(400, "GET /uri takes the argument uri, a capability; it is missing")
    if call.arguments.operation == "open":
        return redirect(opened_url(text))
    if isinstance(cap_of(text), UnknownCap) and not text.startswith(("URI:", "ro.", "imm.")):
        raise WebError(400, "Invalid capability: copy it whole")
    kept = {name: value for name, value in call.arguments.values.items() if name != "uri"}
    query = f"?{urlencode(kept)}" if kept else ""
    return redirect(f"/uri/{quote(text, safe='')}{query}")


async def _upload(call: ApiRequest) -> HttpResponse:
    cap = await store_file(call, uploaded(call))
    target = call.arguments.get("when_done")
    if target:
        return redirect(local_target(target.replace("%(uri)s", quote(str(cap), safe=""))))
    if call.arguments.format() in ("SDMF", "MDMF"):
        return HttpResponse(str(cap))
    stored = {"title": "Stored", "cap": str(cap), "url": f"/uri/{quote(str(cap), safe='')}?t=info"}
    return render_page("stored.html", stored)


async def _make_directory(call: ApiRequest) -> HttpResponse:
    cap = await new_directory(call)
    if call.arguments.flag("redirect_to_result"):
        return redirect(f"uri/{quote(str(cap), safe='')}", 303)
    return HttpResponse(str(cap))


def uploaded(call: ApiRequest) -> BodySpool:
    """
    Return the only file of a form.

    Raises:
        WebError: the form has no file, or several.
    """
    if not call.arguments.files:
        raise WebError(400, "the form has no field 'file' with the content to store")
    if len(call.arguments.files) > 1:
        raise WebError(
            400, "the form has several files; only a directory takes them, without a name"
        )
    return call.arguments.files[0].body


def may_be_stored_early(call: ApiRequest) -> bool:
    """
    Return whether the body of a PUT is stored while its path is followed, which saves a round trip.

    If the path leads to a mutable file, the stored body is not needed. So only small bodies are stored early.
    """
    return (
        call.method == "PUT"
        and len(call.names) > 2
        and not {"t", "format", "mutable", "offset"} & call.arguments.values.keys()
        and call.body.refused is None
        and call.body.size <= IN_MEMORY_BYTES
    )


async def store_file(call: ApiRequest, body: BodySpool) -> Cap:
    """Store a body as a new file in the requested format, and return its cap."""
    if call.stored is not None and body is call.body:
        return await call.stored
    chosen = call.arguments.format()
    private_key = private_key_of(call)
    name = call.arguments.get("progress")
    watched: Any = nullcontext() if name is None else call.http.site.uploads.watched(name)
    with body.opened() as source, watched as progress:
        if chosen is None or chosen == "CHK":
            return (await call.grid.put(source, progress=progress)).cap
        made = await call.grid.create_mutable(
            source, format=chosen.lower(), private_key=private_key
        )
        return made.cap


async def new_directory(call: ApiRequest) -> Cap:
    """
    Store the directory that a request describes, with the children that the body lists; return its cap.

    Raises:
        WebError: the request is malformed.
    """
    operation = call.arguments.operation
    if operation == "mkdir-immutable":
        children = packed_children(parse_children(_children(call)))
        return directory_cap((await call.grid.put(pack_immutable(children))).cap)
    chosen = call.arguments.format()
    if chosen == "CHK":
        raise WebError(400, "a directory that can change is SDMF or MDMF, not CHK")
    links = []
    if operation == "mkdir-with-children":
        links = links_of(parse_children(_children(call)), "true")
    elif call.body.size and not call.arguments.is_form:
        raise WebError(400, "t=mkdir takes no body; t=mkdir-with-children does")
    made = await create_directory(
        call.grid,
        None if chosen is None else chosen.lower(),
        links,
        private_key_of(call),
    )
    return made.cap


def _children(call: ApiRequest) -> bytes:
    if call.arguments.is_form:
        return b""
    return call.body.read_all(call.settings.limits.children_bytes, "the list of children")


def private_key_of(call: ApiRequest) -> bytes | None:
    """
    Return the given key for a new mutable object, in DER; None: the request gives none.

    Raises:
        WebError: the argument is not base64.
    """
    text = call.arguments.get("private-key")
    if text is None:
        return None
    try:
        return urlsafe_b64decode(text.encode("ascii"))
    except ValueError:
        raise WebError(400, "private-key is not the base64url of a DER key") from None

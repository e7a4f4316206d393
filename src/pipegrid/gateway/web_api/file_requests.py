"""Requests for files: downloads with ranges, PUTs of content or of caps, and changes of mutable files."""

from __future__ import annotations

from io import BytesIO

import attrs

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, UnknownCap, writes
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.errors import NotEnoughSharesError
from pipegrid.gateway.body_spool import BodySpool
from pipegrid.gateway.http_response import JSON_OF_OBJECTS, HttpResponse, WebError, json_text
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.byte_ranges import (
    content_type,
    disposition,
    entity_tag,
    matches,
    parse_range,
)
from pipegrid.gateway.web_api.children_json import link_of
from pipegrid.gateway.web_api.download_turns import PacedDownload
from pipegrid.gateway.web_api.new_objects import store_file
from pipegrid.gateway.web_api.object_json import (
    file_json,
    kind_word,
    read_cap_text,
    unknown_json,
)
from pipegrid.gateway.web_api.path_lookup import (
    FoundObject,
    check_writes,
    is_verifier,
    unknown_cap,
    unreadable,
)
from pipegrid.gateway.web_ui.check_page import check_form
from pipegrid.gateway.web_ui.object_page import object_page
from pipegrid.gateway.web_ui.read_cap_page import share_page
from pipegrid.tree.directory import Directory, make_directories

CONTENT_POLICY = (
    "sandbox; default-src 'none'; img-src 'self' data:; media-src 'self' data:; "
    "style-src 'unsafe-inline'"
)
"""Content policy of stored files: scripts cannot run, and a file can neither load nor send anything."""


_IN_PAGES = frozenset(
    {
        "audioworklet",
        "embed",
        "fencedframe",
        "frame",
        "iframe",
        "json",
        "manifest",
        "object",
        "paintworklet",
        "script",
        "serviceworker",
        "sharedworker",
        "style",
        "worker",
        "xslt",
    }
)
"""Values of ``Sec-Fetch-Dest`` with which a page would use the file as its script, style or frame."""


def check_readable(cap: Cap | None) -> ChkCap | LitCap | MutableCap:
    """
    Return a cap if it reads a file.

    Raises:
        WebError: the cap does not read a file.
    """
    if isinstance(cap, UnknownCap):
        raise unknown_cap(cap)
    if is_verifier(cap):
        raise WebError(400, "this is a verifier cap: it checks shares but cannot read the file")
    if not isinstance(cap, (ChkCap, LitCap, MutableCap)):
        raise WebError(400, "this is not the capability of a file")
    return cap


async def download(call: ApiRequest, given: Cap | None, name: str) -> HttpResponse | None:
    """
    Answer with a file, or the requested range of it.

    Args:
        name: file name, which implies the media type; empty if there is none.
    """
    if call.header("sec-fetch-dest") in _IN_PAGES:
        raise WebError(403, "a stored file is not served as a script, a style or a frame of a page")
    cap = check_readable(given)
    http = call.http
    name = call.arguments.text("filename") or name
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": content_type(name),
        "Content-Security-Policy": CONTENT_POLICY,
    }
    if call.arguments.flag("save"):
        headers["Content-Disposition"] = disposition(name or "download")
    tag = entity_tag(cap, call.arguments.operation)
    if tag is not None:
        if matches(call.header("if-none-match"), tag):
            # Browsers give a cached response the headers of a 304, so these headers limit what the file may
            # do.
            return HttpResponse(status=304, headers={**headers, "ETag": f'"{tag}"'})
        if not call.is_head:
            headers["ETag"] = f'"{tag}"'

    def begin(size: int) -> tuple[int, int]:
        found = parse_range(call.header("range"), size)
        http.setResponseCode(206 if found.partial else 200)
        for name, value in headers.items():
            http.setHeader(name, value)
        http.setHeader("Content-Length", str(found.length))
        if found.partial:
            http.setHeader("Content-Range", found.content_range)
        return (found.start, 0) if call.is_head else (found.start, found.length)

    try:
        if not call.is_head:
            await PacedDownload(call.grid, cap, http, begin, http.site.downloads).run()
        elif isinstance(cap, MutableCap):
            await call.grid.get(cap, BytesIO(), range_of=begin)
        else:
            begin(cap.size)  # the cap contains the size, so no server is queried
    except NotEnoughSharesError as error:
        raise unreadable(cap, error) from error
    http.finish()
    return None


# GET with ``t``, for a file or an object of unknown kind.


async def get_file(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    """Answer a GET request for an object that is not a directory."""
    operation = call.arguments.operation
    cap = found.cap
    if found.slash:
        raise WebError(400, "a path with a slash at its end names a directory, and this is a file")
    if operation == "json":
        return tagged(call, cap, await _json(call, found))
    if operation in ("info", "open"):
        return await object_page(call, found)
    if operation == "share":
        return await share_page(call, found)
    if operation == "check-form":
        return await check_form(call, found)
    if operation == "":
        return await download(call, cap, found.name)
    if operation not in ("uri", "readonly-uri"):
        raise WebError(400, "GET of a file does not support this t")
    return tagged(call, cap, cap_text(cap, operation))


def cap_text(cap: Cap | None, operation: str) -> HttpResponse:
    """Return the response to ``t=uri`` or ``t=readonly-uri``: the cap, or its read cap."""
    if cap is None:
        raise WebError(400, "no capability of this object is known")
    if isinstance(cap, UnknownCap):
        raise unknown_cap(cap)
    return HttpResponse(str(cap) if operation == "uri" else read_cap_text(cap))


def tagged(call: ApiRequest, cap: Cap | None, response: HttpResponse) -> HttpResponse:
    """
    Return a response with the entity tag of an immutable object; status 304 if the client has the object
    already.
    """
    tag = entity_tag(cap, call.arguments.operation)
    if tag is None:
        return response
    headers = {**response.headers, "ETag": f'"{tag}"'}
    if matches(call.header("if-none-match"), tag):
        return HttpResponse(status=304, headers=headers)
    return attrs.evolve(response, headers=headers)


async def _json(call: ApiRequest, found: FoundObject) -> HttpResponse:
    cap, kind = found.cap, kind_word(found.cap)
    if kind == "unknown":
        _check_future(found)
        properties = unknown_json(found.child, cap)
    else:
        assert isinstance(cap, (ChkCap, LitCap, MutableCap))
        size = await mutable_size(call, cap) if isinstance(cap, MutableCap) else None
        properties = file_json(cap, size)
    if found.metadata is not None:
        properties["metadata"] = found.metadata
    return HttpResponse(json_text([kind, properties]), content_type=JSON_OF_OBJECTS)


def _check_future(found: FoundObject) -> None:
    """
    Refuse a text that cannot be a cap, not even one of a later version, which would also begin with ``URI:``.
    """
    cap = found.cap
    future = ("URI:", "ro.URI:", "imm.URI:")
    if found.child is None and isinstance(cap, UnknownCap) and not cap.text.startswith(future):
        raise unknown_cap(cap)


async def mutable_size(call: ApiRequest, cap: MutableCap) -> int | None:
    """Return the size of a mutable file in bytes; None: no version was found."""
    found: list[int] = []

    def note(size: int) -> tuple[int, int]:
        found.append(size)
        return 0, 0

    try:
        await call.grid.get(cap, BytesIO(), range_of=note)
    except NotEnoughSharesError:
        return None
    return found[-1]


# Request bodies that replace existing content, and links to new files.


async def put_object(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer a PUT request without ``t`` or with ``t=uri``, whether the object exists or not."""
    if call.header("content-range") is not None:
        raise WebError(501, "Content-Range in a PUT is not supported; use the argument offset")
    if call.arguments.operation == "uri":
        return await _put_cap(call, found)
    if found.exists and isinstance(found.cap, DirectoryCap):
        raise WebError(400, "PUT to a directory: give the name of a file in it")
    if isinstance(found.cap, MutableCap):
        check_overwritable(found.cap)
    if found.slash:
        raise WebError(400, "the path of a file has no slash at its end")
    if found.exists:
        return HttpResponse(str(await replace_file(call, found, call.body)))
    return HttpResponse(str(await link_file(call, found, call.body)), 201)


async def replace_file(call: ApiRequest, found: FoundObject, body: BodySpool) -> Cap:
    """
    Replace an existing file: overwrite it if it is mutable, otherwise link a new file in its place.

    Raises:
        WebError: the file cannot be replaced.
    """
    replace = call.arguments.replace()
    if isinstance(found.cap, MutableCap):
        if replace == "false":
            raise WebError(409, "there is a mutable file of this name, and replace=false")
        await overwrite(call, found.cap, body)
        return found.cap
    if call.arguments.get("offset") is not None:
        raise WebError(400, "an immutable file cannot be changed at an offset; replace it")
    if found.parent is None:
        if isinstance(found.cap, UnknownCap):
            raise unknown_cap(found.cap)
        raise WebError(400, "this capability names an immutable file, which never changes")
    if replace == "false":
        raise WebError(409, f"'{found.name}' exists, and replace=false")
    return await link_file(call, found, body)


def check_overwritable(cap: MutableCap) -> None:
    """
    Check that a cap of a mutable file is a write cap.

    Raises:
        WebError: the cap is not a write cap.
    """
    if not writes(cap):
        raise WebError(400, "replace or update requested with read-only cap; use the write cap")


async def overwrite(call: ApiRequest, cap: MutableCap, body: BodySpool) -> None:
    """
    Replace the content of a mutable file, or write the body at the argument ``offset``.

    Raises:
        WebError: the cap is not a write cap, or the offset is not valid.
    """
    check_overwritable(cap)
    text = call.arguments.get("offset")
    if text is None:
        with body.opened() as source:
            await call.grid.overwrite(cap, source)
        return
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise WebError(400, "the offset is not a number of bytes, 0 or more")
    data = body.read_all(call.settings.limits.mutable_bytes, "a change of a mutable file")
    await call.grid.update(cap, int(digits), data)


async def link_file(call: ApiRequest, found: FoundObject, body: BodySpool) -> Cap:
    """Store a body as a file, link the file at the end of a path, and return its cap."""
    replace = call.arguments.replace()
    call.arguments.format()
    if found.parent is not None:
        check_writes(found.parent)
    cap = await store_file(call, body)
    directory, name = await parent_for(call, found)
    # Another client may have linked a file of this name meanwhile; ``replace`` applies to that file as well.
    await directory.change([Link(name, cap, None, None, replace != "false", replace == "true")])
    return cap


def links_cap(call: ApiRequest) -> bool:
    """Return whether a request links a cap at the end of a path; then the last name need not be looked up."""
    names = call.names[2:]
    return call.method == "PUT" and call.arguments.operation == "uri" and bool(names and names[-1])


async def _put_cap(call: ApiRequest, found: FoundObject) -> HttpResponse:
    text = call.body.read_all(call.settings.limits.text_bytes, "a capability").decode(
        "utf-8", "replace"
    )
    text = text.removesuffix("\n").removesuffix("\r")
    if found.parent is None:
        raise WebError(400, "t=uri gives a name to a capability; give the path of that name")
    check_writes(found.parent)
    link = link_of(found.name, {"rw_uri": text}, call.arguments.replace())
    directory, name = await parent_for(call, found)
    try:
        await directory.change([attrs.evolve(link, name=name)])
    except NotEnoughSharesError as error:
        raise unreadable(directory.cap, error) from error
    return HttpResponse(text)


async def parent_for(call: ApiRequest, found: FoundObject) -> tuple[Directory, str]:
    """
    Return the directory and the name at which to link; create missing directories.

    Raises:
        WebError: the path has no name after the cap, or a directory cannot be changed.
    """
    parent = check_writes(found.parent)
    if len(found.missing) < 2:
        return Directory(call.grid, parent), found.name
    directory = await make_directories(call.grid, parent, found.missing[:-1], "sdmf")
    return directory, found.missing[-1]

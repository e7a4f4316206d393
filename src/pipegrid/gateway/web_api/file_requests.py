"""Requests about files: downloads with ranges, and bodies that become files."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from pipegrid.core.caps import Cap, ChkCap, LitCap, MutableCap, UnknownCap
from pipegrid.errors import NotEnoughSharesError
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.web_api.api_request import ApiRequest, unknown_cap
from pipegrid.gateway.web_api.byte_ranges import (
    ByteRange,
    content_type,
    disposition,
    entity_tag,
    matches,
    parse_range,
)
from pipegrid.gateway.web_api.path_lookup import is_verifier, unreadable
from pipegrid.gateway.web_api.web_errors import WebError

CONTENT_POLICY = (
    "sandbox; default-src 'none'; img-src 'self' data:; media-src 'self' data:; "
    "style-src 'unsafe-inline'"
)
"""Of stored files: whatever is in them cannot run, nor load or send anything."""


def check_readable(cap: Cap | None) -> ChkCap | LitCap | MutableCap:
    """
    Return the cap of a file that can be read.

    Raises:
        WebError: it is none.
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
    Answer with a file, or a range of it.

    Args:
        name: of the file, for its media type; empty if it has none.
    """
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
            return HttpResponse(status=304, headers={"ETag": f'"{tag}"'})
        headers["ETag"] = f'"{tag}"'

    def begin(size: int) -> tuple[int, int]:
        found = parse_range(call.header("range"), size)
        _set_head(http, found, headers)
        return (found.start, 0) if call.is_head else (found.start, found.length)

    try:
        if call.is_head:
            await _head(call, cap, begin)
        else:
            await call.grid.get(cap, http, range_of=begin)
    except NotEnoughSharesError as error:
        raise unreadable(cap, error) from error
    http.finish()
    return None


async def _head(call: ApiRequest, cap: ChkCap | LitCap | MutableCap, begin: Any) -> None:
    """Find out the size; of what is immutable the cap says it, and no server is asked."""
    if isinstance(cap, MutableCap):
        await call.grid.get(cap, BytesIO(), range_of=begin)
    else:
        begin(cap.size)


def _set_head(http: Any, found: ByteRange, headers: dict[str, str]) -> None:
    http.setResponseCode(206 if found.partial else 200)
    for name, value in headers.items():
        http.setHeader(name, value)
    http.setHeader("Content-Length", str(found.length))
    if found.partial:
        http.setHeader("Content-Range", found.content_range)

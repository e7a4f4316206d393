"""The page that shares an object: shows its read cap as a link, as text and as a QR code."""

from __future__ import annotations

from urllib.parse import quote, urlencode

import segno
from markupsafe import Markup

from pipegrid.core.caps import Cap, DirectoryCap, UnknownCap, mutable_file
from pipegrid.gateway.http_response import HttpResponse, WebError
from pipegrid.gateway.request_origin import LOOPBACK, host_name
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.path_lookup import FoundObject, is_verifier
from pipegrid.gateway.web_ui.page_paths import content_url, object_path
from pipegrid.gateway.web_ui.page_templates import render_page

MOST_CODE_CHARACTERS = 1000
"""Maximum length of the text in a QR code; phones can still read such a code from a screen."""

_BORDER = 4
"""Width of the empty border around a QR code, in modules; the standard requires it."""


async def share_page(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Answer ``t=share``: a page with the read cap of an object, for other people.

    Raises:
        WebError: no read cap of the object is known.
    """
    cap = found.cap
    if cap is None or isinstance(cap, UnknownCap) or is_verifier(cap):
        raise WebError(
            400, "this object cannot be shared, since no capability that reads it is known"
        )
    read = cap.readonly()
    name = found.name or object_path(call).name or call.arguments.text("filename")
    link_path, host = _read_path(read, name), call.header("host") or ""
    known = host_name(host.encode("utf-8", "replace"))
    is_local = known is None or known in LOOPBACK
    link = f"http://{host.strip()}{link_path}" if known else link_path
    coded = str(read) if is_local else link
    values = {
        "title": "Share",
        "name": name,
        "is_directory": isinstance(cap, DirectoryCap),
        "is_mutable": mutable_file(cap, directories=True) is not None,
        "read_cap": str(read),
        "link": link,
        "link_path": link_path,
        "is_local": is_local,
        "code": qr_code(coded),
        "code_is_link": coded == link,
        "back": _back(call, found, name),
    }
    return render_page("share.html", values)


def _read_path(read: Cap, name: str) -> str:
    if isinstance(read, DirectoryCap):
        return f"/uri/{quote(str(read), safe='')}/"
    return content_url(read, name)


def _back(call: ApiRequest, found: FoundObject, name: str) -> str:
    path = object_path(call)
    if found.is_directory:
        return path.directory_url
    query = {"t": "info", **({"filename": name} if name and not path.names else {})}
    return f"{path.url}?{urlencode(query)}"


def qr_code(text: str) -> Markup | None:
    """
    Return a QR code as an SVG element without styles or links.

    Args:
        text: the text to encode; if it is longer than ``MOST_CODE_CHARACTERS``, None is returned.
    """
    if len(text) > MOST_CODE_CHARACTERS:
        return None
    rows = [bytes(row) for row in segno.make(text, error="m", micro=False).matrix]
    dark = []
    for y, row in enumerate(rows, _BORDER):
        x = 0
        while (begin := row.find(1, x)) >= 0:
            x = row.find(0, begin)
            x = len(row) if x < 0 else x
            dark.append(f"M{begin + _BORDER} {y}h{x - begin}v1h-{x - begin}z")
    side = len(rows) + 2 * _BORDER
    return Markup(
        f'<svg class="qr" viewBox="0 0 {side} {side}" role="img" shape-rendering="crispEdges" '
        'aria-label="QR code"><path fill="#fff" d="M0 0h{0}v{0}h-{0}z"/>'
        '<path fill="#000" d="{1}"/></svg>'.replace("{0}", str(side)).replace("{1}", "".join(dark))
    )

"""``/interface/``: style sheet, script and icon of the pages, which browsers cache until they change."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import attrs
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from pipegrid.gateway.http_response import HttpResponse, send

PREFIX = "/interface/"

_TYPES = {
    ".css": "text/css;charset=utf-8",
    ".js": "text/javascript;charset=utf-8",
    ".svg": "image/svg+xml",
}
_A_YEAR_S = 31_536_000
_HASH_CHARACTERS = 12


@attrs.frozen
class Asset:
    """
    A file of the web interface.

    Attributes:
        packed: the content, compressed with gzip.
        path: path of the file's URL; contains a hash of the content, so that browsers never use an old
            version.
    """

    path: str
    content_type: str
    data: bytes = attrs.field(repr=False)
    packed: bytes = attrs.field(repr=False)


@cache
def assets() -> Mapping[str, Asset]:
    """Return all assets by file name, such as ``interface.css``."""
    found: dict[str, Asset] = {}
    for file in resources.files(__package__).joinpath("assets").iterdir():
        stem, dot, suffix = file.name.rpartition(".")
        kind = _TYPES.get(dot + suffix)
        if kind is None:
            continue
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:_HASH_CHARACTERS]
        path = f"{PREFIX}{stem}.{digest}.{suffix}"
        found[file.name] = Asset(path, kind, data, gzip.compress(data, 9, mtime=0))
    return found


def asset_path(name: str) -> str:
    """Return the URL path of the asset with this file name; used in templates."""
    return assets()[name].path


class AssetsResource(Resource):
    """A resource that answers requests below ``/interface/``."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self._by_path = {asset.path.encode("ascii"): asset for asset in assets().values()}

    def render_GET(self, request: Any) -> bytes | int:
        """Answer a GET or HEAD request; see ``IResource``."""
        asset = self._by_path.get(request.path)
        if asset is None:
            send(
                request, HttpResponse("the interface has no such file; load the page again\n", 404)
            )
            return NOT_DONE_YET
        headers = {
            "Cache-Control": f"public, max-age={_A_YEAR_S}, immutable",
            "Vary": "Accept-Encoding",
            "Content-Security-Policy": "default-src 'none'",
        }
        given = request.getHeader("accept-encoding") or ""
        data = asset.data
        if "gzip" in given.replace(" ", "").lower().split(","):
            data = asset.packed
            headers["Content-Encoding"] = "gzip"
        send(request, HttpResponse(data, 200, asset.content_type, headers))
        return NOT_DONE_YET

"""The page of one object: a preview if it is a file, what is known about it, and its caps."""

from __future__ import annotations

from io import BytesIO
from typing import Any, Literal

import attrs

from pipegrid.core import base32
from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, UnknownCap, writes
from pipegrid.core.text import harmless
from pipegrid.errors import PipegridError
from pipegrid.gateway.http_response import HttpResponse, problem_of
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.byte_ranges import content_type
from pipegrid.gateway.web_api.path_lookup import FoundObject, is_verifier
from pipegrid.gateway.web_ui.page_paths import (
    ObjectPath,
    content_url,
    message,
    object_path,
    share_url,
)
from pipegrid.gateway.web_ui.page_templates import as_time, plain_sentence, render_page, shown_date

TEXT_BYTES = 64 << 10
"""How many bytes of a text file its preview shows."""

MOST_CAP_CHARACTERS = 2000
"""Maximum number of characters shown of a cap of unknown kind."""

Preview = Literal["text", "image", "audio", "video", "problem", "none"]

_TEXTS = frozenset(
    {
        "application/json",
        "application/javascript",
        "application/x-sh",
        "application/x-python-code",
        "application/xml",
        "application/x-yaml",
        "application/sql",
        "application/x-tex",
    }
)
_IMAGES = frozenset(
    {
        "image/png",
        "image/jpeg",
        "image/gif",
        "image/webp",
        "image/avif",
        "image/bmp",
        "image/svg+xml",
        "image/x-icon",
        "image/vnd.microsoft.icon",
    }
)
"""Image types that browsers show; an SVG in an ``img`` element runs no script and loads nothing."""


@attrs.frozen
class FileView:
    """
    What the page of a file shows.

    Attributes:
        preview: how the content is shown.
        text: content of a text file, or why the content cannot be shown.
        is_cut: whether ``text`` is only the beginning of the file.
        size: in bytes; None: not known.
    """

    preview: Preview
    text: str = ""
    is_cut: bool = False
    size: int | None = None


def preview_kind(media_type: str) -> Preview:
    """Return how the page shows a file of this media type."""
    if media_type in _IMAGES:
        return "image"
    start = media_type.partition("/")[0]
    if start == "text" or media_type in _TEXTS or media_type.endswith(("+xml", "+json")):
        return "text"
    if start == "audio":
        return "audio"
    return "video" if start == "video" else "none"


async def object_page(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer ``t=info``: a page with what is known about an object and, if it is a file, a preview."""
    cap, path = found.cap, object_path(call)
    name = found.name or path.name or call.arguments.text("filename")
    values = _values(call, found, path, name)
    if not isinstance(cap, (ChkCap, LitCap, MutableCap)) or is_verifier(cap):
        return render_page("object.html", {**values, "view": None})
    more = {
        "view": await _look(call, cap, content_type(name)),
        "media_type": content_type(name),
        "source": content_url(cap, name),
        "download": content_url(cap, name, save=True),
    }
    return render_page("object.html", {**values, **more})


def _values(call: ApiRequest, found: FoundObject, path: ObjectPath, name: str) -> dict[str, Any]:
    cap = found.cap
    parent = path.parent if found.parent is not None else None
    known = cap is not None and not isinstance(cap, UnknownCap) and not is_verifier(cap)
    return {
        "title": name
        or ("Directory" if isinstance(cap, DirectoryCap) else "File" if known else "Object"),
        "path": path,
        "url": path.directory_url if isinstance(cap, DirectoryCap) else path.url,
        "message": message(call),
        "is_directory": isinstance(cap, DirectoryCap) and known,
        "is_writable": writes(cap),
        "share": share_url(cap, name) if cap is not None and known else None,
        "entry_of": parent if parent and writes(found.parent) else None,
        "facts": object_facts(found),
        "caps": object_caps(cap),
    }


async def _look(call: ApiRequest, cap: ChkCap | LitCap | MutableCap, media_type: str) -> FileView:
    """Return the preview of a file; reads only texts, and the size of a mutable file."""
    kind = preview_kind(media_type)
    if not isinstance(cap, MutableCap) and kind != "text":
        return FileView(kind, size=cap.size)
    size = None if isinstance(cap, MutableCap) else cap.size
    data, sizes = BytesIO(), [] if size is None else [size]

    def begin(found: int) -> tuple[int, int]:
        sizes.append(found)
        data.seek(0)
        data.truncate()
        return 0, min(found, TEXT_BYTES) if kind == "text" else 0

    try:
        await call.grid.get(cap, data, range_of=begin)
    except PipegridError as error:
        return FileView("problem", plain_sentence(str(problem_of(error))), size=size)
    content, size = data.getvalue(), sizes[-1]
    is_cut = kind == "text" and size > len(content)
    if b"\0" in content[:1000]:
        return FileView("none", "", is_cut, size)
    # The last character may be incomplete.
    text = content.decode("utf-8", "replace")
    return FileView(kind, harmless(text.rstrip("\ufffd") if is_cut else text), is_cut, size)


# What is known about an object without reading it.


def object_facts(found: FoundObject) -> list[tuple[str, str]]:
    """Return what an object's cap and entry tell about it, as labels and values; none of these is secret."""
    cap = found.cap
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    facts: list[tuple[str, str]] = []
    if cap is None or isinstance(cap, UnknownCap):
        facts.append(
            ("Kind", "Unknown: its capability is of a kind that this version does not know")
        )
    elif is_verifier(cap):
        facts.append(("Kind", "Verify cap: it checks shares, and reads nothing"))
    elif isinstance(file, MutableCap):
        kind = "MDMF" if file.kind == "MDMF" else "SDMF"
        access = "can be changed with this cap" if writes(file) else "read-only with this cap"
        facts.append(("Format", f"Mutable ({kind}), {access}"))
    elif isinstance(file, LitCap):
        facts.append(("Format", "Immutable, contained in its cap"))
    elif isinstance(file, ChkCap):
        facts.append(("Format", "Immutable"))
        facts.append(("Shares", f"any {file.required_shares} of {file.total_shares} restore it"))
    facts += _dates(found.metadata or {})
    index = None if file is None or isinstance(file, (LitCap, UnknownCap)) else file.storage_index
    if index is not None:
        facts.append(("Storage index", base32.encode(index)))
    return facts


def _dates(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    tahoe = metadata.get("tahoe")
    given = tahoe if isinstance(tahoe, dict) else {}
    dates = (
        ("Changed", metadata.get("mtime")),
        ("Linked first", given.get("linkcrtime")),
        ("Linked last", given.get("linkmotime")),
    )
    times = [(text, shown_date(as_time(value))) for text, value in dates]
    return [(text, f"{when} UTC") for text, when in times if when]


def object_caps(cap: Cap | None) -> list[tuple[str, str, str]]:
    """Return the caps that derive from a cap: for each its name, the cap itself, and what it grants."""
    if cap is None:
        return []
    if isinstance(cap, UnknownCap):
        shown = str(cap)[:MOST_CAP_CHARACTERS]
        return [("Capability", shown, "Of a kind that this version does not know.")]
    found = []
    below = ", and everything below it" if isinstance(cap, DirectoryCap) else ""
    if writes(cap):
        found.append(("Write cap", str(cap), f"Reads and changes it{below}. Keep it to yourself."))
    if not is_verifier(cap):
        found.append(("Read cap", str(cap.readonly()), f"Reads it{below}."))
    verifier = cap.verifier()
    if verifier is not None:
        found.append(("Verify cap", str(verifier), "Checks its shares, and reads nothing."))
    return found

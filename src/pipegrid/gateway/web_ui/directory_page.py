"""
The page of a directory, with its entries and forms that change them; and the page that changes one entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import attrs

from pipegrid.core.caps import (
    DirectoryCap,
    MutableCap,
    UnknownCap,
    immutable_size,
    writes,
)
from pipegrid.core.text import composed, counted
from pipegrid.errors import PipegridError
from pipegrid.gateway.http_response import HttpResponse, no_such_child, problem_of
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.byte_ranges import content_type
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.gateway.web_api.object_json import known_cap
from pipegrid.gateway.web_api.path_lookup import (
    FoundObject,
    best_cap,
    check_writes,
    children_of,
    is_verifier,
)
from pipegrid.gateway.web_ui.backup_page import keeps_backups
from pipegrid.gateway.web_ui.page_paths import (
    ObjectPath,
    content_url,
    message,
    object_path,
    share_url,
)
from pipegrid.gateway.web_ui.page_templates import as_time, plain_sentence, render_page
from pipegrid.tree.directory import Child

PAGE_ROWS = 200
"""Maximum number of entries on one page."""

PAGE_NAME_CHARACTERS = 200_000
"""Maximum total length of the names on one page, which has up to 30 bytes for each of these characters."""

MOST_TARGETS = 500
"""Maximum number of directories that a form offers as targets of a move."""

_DIGITS = re.compile(r"(\d+)")


@attrs.frozen
class EntryRow:
    """
    An entry, as its row on the page shows it.

    Attributes:
        kind: ``directory``, ``file`` or ``unknown``.
        words: the media type, ``directory`` or ``unknown``.
        note: ``read-only``, ``immutable``, ``mutable``, or empty.
        size: size of a file in bytes; None: not known without reading it.
        changed: time of the last change, in seconds since 1970; None: not known.
        url: URL of the object's page; None: it has none.
        content, share, edit: URLs that download, share or change it; None: not possible.
    """

    name: str
    kind: str = "unknown"
    words: str = "unknown"
    note: str = ""
    size: int | None = None
    changed: float | None = None
    url: str | None = None
    content: str | None = None
    share: str | None = None
    edit: str | None = None


async def directory_page(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Return the page of a directory; if the directory cannot be read, the page says so."""
    cap, path = found.directory, object_path(call)
    values: dict[str, Any] = {
        "title": path.name or "Directory",
        "path": path,
        "message": message(call),
        "is_writable": writes(cap),
        "is_immutable": not isinstance(cap.file, MutableCap),
        "share": share_url(cap, path.name),
        "index": storage_index_text(cap),
    }
    try:
        children = await children_of(call.grid, cap)
    except PipegridError as error:
        text = str(problem_of(error))
        return render_page(
            "unreadable.html", {**values, "text": plain_sentence(text), "full": text}
        )
    return render_page("directory.html", {**values, **_table(call, path, cap, children)})


def _table(
    call: ApiRequest, path: ObjectPath, cap: DirectoryCap, children: Mapping[str, Child]
) -> dict[str, Any]:
    order, is_down = call.arguments.text("sort"), call.arguments.text("order") == "down"
    if order not in _ORDERS:
        order = "name"
    sorted_children = sorted(children.values(), key=_ORDERS[order], reverse=is_down)
    start = _start(call.arguments.text("from"), len(sorted_children))
    shown = list(_one_page(sorted_children[start:]))
    end = start + len(shown)
    given = {"sort": order, "order": "down" if is_down else "up"}

    def place(at: int) -> str:
        return f"{path.directory_url}?{urlencode({**given, 'from': at})}"

    return {
        "has_backups": keeps_backups(children),
        "rows": [entry_row(path, child, writes(cap)) for child in shown],
        "summary": _summary(children.values()),
        "total": len(sorted_children),
        "start": start,
        "end": end,
        "previous": place(max(0, start - PAGE_ROWS)) if start else None,
        "next": place(end) if end < len(sorted_children) else None,
        "columns": [_column(path, each, order, is_down) for each in _COLUMNS],
    }


def _start(text: str, total: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number if number < total else 0


def _one_page(children: Iterable[Child]) -> Iterable[Child]:
    characters = 0
    for count, child in enumerate(children):
        characters += len(child.name)
        if count == PAGE_ROWS or (count and characters > PAGE_NAME_CHARACTERS):
            return
        yield child


def entry_row(path: ObjectPath, child: Child, is_writable: bool) -> EntryRow:
    """
    Return the row of an entry.

    Args:
        path: path of its directory.
        is_writable: whether the directory can be changed.
    """
    cap = known_cap(child)
    here = path.child(child.name, best_cap(child))
    row = EntryRow(child.name, changed=_changed(child))
    if is_writable:
        query = urlencode({"t": "rename-form", "name": child.name})
        row = attrs.evolve(row, edit=f"{path.directory_url}?{query}")
    if cap is None or isinstance(cap, UnknownCap) or is_verifier(cap):
        return attrs.evolve(
            row, url=f"{here.url}?t=info" if here and child.cap is not None else None
        )
    row = attrs.evolve(row, share=share_url(cap, child.name))
    if isinstance(cap, DirectoryCap):
        url = here.directory_url if here else None
        return attrs.evolve(row, kind="directory", words="directory", note=_note(cap), url=url)
    return attrs.evolve(
        row,
        kind="file",
        words=content_type(child.name),
        note="mutable" if isinstance(cap, MutableCap) else "",
        size=immutable_size(cap),
        url=f"{here.url}?t=info" if here else None,
        content=content_url(cap, child.name, save=True),
    )


def _note(cap: DirectoryCap) -> str:
    if not isinstance(cap.file, MutableCap):
        return "immutable"
    return "" if writes(cap) else "read-only"


def _changed(child: Child) -> float | None:
    """Return when the file was changed, else when it was linked, in seconds since 1970; None: not known."""
    when = as_time(child.metadata.get("mtime"))
    if when is None:
        tahoe = child.metadata.get("tahoe")
        when = as_time(tahoe.get("linkmotime")) if isinstance(tahoe, dict) else None
    return when


# Sort orders; by name, directories come first, and numbers in names are compared by value.


def _by_name(child: Child) -> tuple[Any, ...]:
    parts = _DIGITS.split(child.name.casefold())
    parts[1::2] = [
        f"{len(digits):05}{digits}" for digits in (each.lstrip("0") for each in parts[1::2])
    ]
    return (not isinstance(known_cap(child), DirectoryCap), parts, child.name)


def _by_size(child: Child) -> tuple[Any, ...]:
    size = immutable_size(known_cap(child))
    return (-1 if size is None else size, child.name)


def _by_change(child: Child) -> tuple[Any, ...]:
    when = _changed(child)
    return (float("-inf") if when is None else when, child.name)


_ORDERS: Mapping[str, Callable[[Child], tuple[Any, ...]]] = {
    "name": _by_name,
    "size": _by_size,
    "changed": _by_change,
}
_COLUMNS = (("name", "Name"), ("size", "Size"), ("changed", "Changed (UTC)"))


def _column(path: ObjectPath, column: tuple[str, str], order: str, is_down: bool) -> dict[str, str]:
    name, text = column
    current = name == order
    # Choosing the same column again reverses the order; sizes and dates begin with the largest.
    turned = not is_down if current else name != "name"
    query = urlencode({"sort": name, "order": "down" if turned else "up"})
    sort = ("descending" if is_down else "ascending") if current else ""
    return {"name": name, "text": text, "url": f"{path.directory_url}?{query}", "sort": sort}


def _summary(children: Iterable[Child]) -> str:
    kinds = [known_cap(child) for child in children]
    directories = sum(isinstance(cap, DirectoryCap) for cap in kinds)
    sizes = [
        immutable_size(cap)
        for cap in kinds
        if cap is not None and not isinstance(cap, DirectoryCap)
    ]
    parts = [counted(directories, "directory", "directories"), counted(len(sizes), "file")]
    unknown = len(kinds) - directories - len(sizes)
    return ", ".join(parts + ([f"{unknown} unknown"] if unknown else []))


# The page that changes one entry.


async def entry_page(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Return the page that renames, moves or deletes the entry that the argument ``name`` names.

    Raises:
        WebError: the directory cannot be changed, or has no such entry.
    """
    cap = check_writes(found.cap)
    path = object_path(call)
    given = call.arguments.text("name")
    children = await children_of(call.grid, cap)
    child = children.get(composed(given))
    if child is None:
        raise no_such_child(given)
    values = {
        "title": "Change an entry",
        "path": path,
        "entry": entry_row(path, child, True),
        "targets": _targets(path, child, children.values()),
    }
    return render_page("entry.html", values)


def _targets(
    path: ObjectPath, child: Child, children: Iterable[Child]
) -> Sequence[tuple[str, str]]:
    """
    Return the directories to which an entry can be moved: for each, the value of ``to_dir`` and the name to
    show.
    """
    found = []
    if path.names and not any("/" in name for name in path.names):
        parent = path.parent
        found.append(("/".join((parent.cap, *parent.names)), "One level up"))
    for each in sorted(children, key=_by_name):
        cap = known_cap(each)
        if each is not child and isinstance(cap, DirectoryCap) and writes(cap):
            found.append((str(cap), each.name))
    return found[:MOST_TARGETS]

"""The page of backups: the runs that `pipegrid backup` or `tahoe backup` keeps in a directory, by date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any
from urllib.parse import quote

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.gateway.http_response import HttpResponse, WebError
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.object_json import known_cap
from pipegrid.gateway.web_api.path_lookup import FoundObject, children_of
from pipegrid.gateway.web_ui.page_templates import render_page
from pipegrid.tree.backup.catalogue import ARCHIVES, LATEST, is_time
from pipegrid.tree.directory import Child
from pipegrid.tree.file_metadata import KEY

MOST_RUNS = 1000
"""Maximum number of runs on the page; the newest are listed."""


@attrs.frozen
class BackupRow:
    """
    One run, as the page lists it.

    Attributes:
        backup: name of the backup; empty: it has none.
        day, time: when the run was, in UTC.
        url: URL of the directory that the run stored.
        files, size, left_out: number of files, of bytes, and of entries left out; None: not known.
    """

    backup: str
    day: str
    time: str
    url: str
    files: int | None = None
    size: int | None = None
    left_out: int | None = None


def keeps_backups(children: Mapping[str, Child]) -> bool:
    """Return whether a directory with these children keeps backups."""
    return isinstance(_archives(children), DirectoryCap) or any(_rows(children))


async def backup_page(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Answer ``t=backups`` of a directory: a page with its runs, the newest first.

    Raises:
        WebError: the directory keeps no backups.
    """
    children = await children_of(call.grid, found.directory)
    archives = _archives(children)
    if isinstance(archives, DirectoryCap):
        call.grid.check_access(archives)
        rows = list(_rows(await children_of(call.grid, archives)))
    else:
        rows = list(_rows(children))
    if not rows and archives is None:
        raise WebError(
            404,
            f"this directory keeps no backups; one that does has {ARCHIVES} and {LATEST}, or is the "
            "catalogue of 'pipegrid backup'",
        )
    rows.sort(key=lambda row: (row.day, row.time, row.backup), reverse=True)
    days = groupby(rows[:MOST_RUNS], key=lambda row: row.day)
    values = {
        "title": "Backups",
        "name": found.name,
        "days": [(day, list(of_day)) for day, of_day in days],
        "count": len(rows),
        "left_out": max(0, len(rows) - MOST_RUNS),
        "names_differ": len({row.backup for row in rows}) > 1,
        "directory": f"{call.http.path.decode('ascii', 'replace').rstrip('/')}/",
    }
    return render_page("backups.html", values)


def _archives(children: Mapping[str, Child]) -> DirectoryCap | None:
    child = children.get(ARCHIVES)
    cap = None if child is None else known_cap(child)
    return cap if isinstance(cap, DirectoryCap) else None


def _rows(children: Mapping[str, Child]) -> Iterator[BackupRow]:
    for child in children.values():
        cap = known_cap(child)
        name, _, time = child.name.rpartition(" ")
        said = _said(child)
        if not isinstance(cap, DirectoryCap) or not is_time(time) or (name and said is None):
            continue
        day, _, hour = time.removesuffix("Z").partition("_")
        url = f"/uri/{quote(str(cap), safe='')}/"
        counts = [_count(said, key) for key in ("files", "bytes", "left_out")]
        yield BackupRow(name, day, hour, url, *counts)


def _said(child: Child) -> Mapping[str, Any] | None:
    ours = child.metadata.get(KEY)
    said = ours.get("backup") if isinstance(ours, dict) else None
    return said if isinstance(said, dict) else None


def _count(said: Mapping[str, Any] | None, key: str) -> int | None:
    value = None if said is None else said.get(key)
    return value if type(value) is int and 0 <= value < 1 << 63 else None

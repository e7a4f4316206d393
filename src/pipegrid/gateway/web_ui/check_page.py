"""The pages of checks and repairs: the form that starts a check, its progress, and its result."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import quote

import attrs

from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.check_json import Json
from pipegrid.gateway.web_api.deep_operations import DeepCheck, DeepOperation
from pipegrid.gateway.web_api.path_lookup import FoundObject
from pipegrid.gateway.web_ui.page_templates import render_page

HANDLE_BYTES = 24
"""Random bytes in the handle of an operation that a form starts; no other client can guess the handle."""

MOST_OBJECTS = 500
"""Maximum number of damaged objects that a page lists; further ones are only counted."""


@attrs.frozen
class DamagedObject:
    """
    A damaged object, as a page lists it.

    Attributes:
        path: names, beginning at the root of the check.
        url: URL of the object's page.
        summary: the result of the check in a few words.
        is_lost: whether too few shares were found to restore the object.
    """

    path: str
    url: str
    summary: str
    is_lost: bool


async def check_form(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Answer ``t=check-form``: the page with the form that checks an object, or a directory with everything
    below it.
    """
    values = {
        "title": "Check a directory" if found.is_directory else "Check a file",
        "name": found.name,
        "is_directory": found.is_directory,
        "action": call.http.path.decode("ascii", "replace"),
        "handle": new_handle(),
    }
    return render_page("check_form.html", values)


def new_handle() -> str:
    """Return a random handle for an operation."""
    return secrets.token_urlsafe(HANDLE_BYTES)


def object_check_page(path: bytes | None, is_directory: bool, result: Json) -> HttpResponse:
    """
    Return the page with the result for one object.

    Args:
        path: path of the request, which is that of the object; None: the object's path is not known.
        result: JSON of the check or repair.
    """
    before = result.get("pre-repair-results", result)
    after = result.get("post-repair-results", result)
    values = {
        "title": "Check of a directory" if is_directory else "Check of a file",
        "action": None if path is None else path.decode("ascii", "replace"),
        "is_healthy": after["results"]["healthy"],
        "is_recoverable": after["results"].get("recoverable", True),
        "repair": _repair_words(result),
        "before": _summary(before) if "repair-attempted" in result else "",
        "after": _summary(after),
        "figures": _figures(after["results"]),
    }
    return render_page("check_result.html", values)


def _summary(result: Json) -> str:
    return str(
        result.get("summary") or ("Healthy" if result["results"]["healthy"] else "Not healthy")
    )


def _repair_words(result: Json) -> str:
    if not result.get("repair-attempted"):
        return "Nothing had to be repaired." if "repair-attempted" in result else ""
    if result["repair-successful"]:
        return "The repair was successful."
    return "The repair was not successful."


_FIGURES = (
    ("count-shares-good", "good shares"),
    ("count-shares-needed", "are needed to restore it"),
    ("count-shares-expected", "are wanted"),
    ("count-corrupt-shares", "damaged shares"),
)


def _figures(results: Json) -> list[tuple[str, int]]:
    return [(text, results[key]) for key, text in _FIGURES if key in results]


# Pages of operations on trees, below ``/operations``.


def operation_page(handle: str, operation: DeepOperation) -> HttpResponse:
    """Return the page of a running or ended operation."""
    values: dict[str, Any] = {
        "title": operation.title,
        "finished": operation.finished,
        "url": f"/operations/{quote(handle, safe='')}",
        "problems": operation.problems.fields().get("unreadable", []),
        "root": f"/uri/{quote(str(operation.root), safe='')}",
    }
    if not isinstance(operation, DeepCheck):
        return render_page("operation.html", {**values, "text": operation.text()})
    return render_page("deep_check.html", {**values, **_deep_check(operation)})


def _deep_check(operation: DeepCheck) -> dict[str, Any]:
    said, stats = operation.json(), operation.stats.fields()
    repairs = "count-repairs-attempted" in said
    suffix = "-pre-repair" if repairs else ""
    checked = said["count-objects-checked"]
    met = stats["count-files"] + stats["count-directories"] - stats["count-literal-files"]
    damaged = said["list-unhealthy-files"]
    return {
        "checked": checked,
        "met": max(checked, met),
        "unhealthy": said[f"count-objects-unhealthy{suffix}"],
        "repairs": repairs,
        "repaired": said.get("count-repairs-successful", 0),
        "not_repaired": said.get("count-objects-unhealthy-post-repair", 0),
        "corrupt": said[f"count-corrupt-shares{suffix}"],
        "damaged": [_damaged(operation, *each) for each in damaged[:MOST_OBJECTS]],
        "left_out": max(0, len(damaged) - MOST_OBJECTS),
        "handle": new_handle(),
    }


def _damaged(operation: DeepOperation, path: list[str], result: Json) -> DamagedObject:
    parts = "/".join(quote(each, safe="") for each in (str(operation.root), *path))
    return DamagedObject(
        "/".join(path) or "the directory itself",
        f"/uri/{parts}?t=info",
        _summary(result),
        not result["results"].get("recoverable", True),
    )


def cancelled_page(operation: DeepOperation) -> HttpResponse:
    """Return the page that reports that an operation was cancelled."""
    root = f"/uri/{quote(str(operation.root), safe='')}"
    return render_page("cancelled.html", {"title": "Cancelled", "root": root})

"""Short HTML pages for people, without scripts; every text in them is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

from pipegrid.core import base32
from pipegrid.core.caps import Cap, DirectoryCap, LitCap, UnknownCap, writes
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.web_api.object_json import known_cap
from pipegrid.tree.directory import Child

HTML = "text/html"


def page(title: str, body: str, status: int = 200) -> HttpResponse:
    """Return a page; ``title`` is escaped here, ``body`` is HTML."""
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    return HttpResponse(text.encode("ascii", "xmlcharrefreplace"), status, HTML)


def directory_page(
    cap: DirectoryCap, children: Mapping[str, Child] | None, problem: str
) -> HttpResponse:
    """
    Return the page of a directory.

    Args:
        children: None: it cannot be read.
        problem: why.
    """
    index = cap.storage_index
    shown = "" if index is None else f" SI={base32.encode(index)}"
    kind = "" if writes(cap) else " (read-only)"
    if children is None:
        return page(f"Directory{shown}{kind}", f"<p>{escape(problem)}</p>")
    rows = "\n".join(_row(child) for child in children.values())
    return page(f"Directory{shown}{kind}", f"<ul>\n{rows}\n</ul>")


def _row(child: Child) -> str:
    cap = known_cap(child)
    name = escape(child.name)
    if cap is None or isinstance(cap, UnknownCap):
        return f"<li>{name} (unknown)</li>"
    text = quote(str(cap), safe="")
    if isinstance(cap, DirectoryCap):
        return f'<li><a href="/uri/{text}">{name}/</a></li>'
    # Below /named a page that is served does not see the cap of its directory.
    return f'<li><a href="/named/{text}/{quote(child.name, safe="")}">{name}</a></li>'


def info_page(kind: str, cap: Cap | None) -> HttpResponse:
    """Return what is known of an object from its capability."""
    rows: list[tuple[str, str]] = [("Object type", kind)]
    if cap is not None:
        rows += _caps_of(cap)
    return page("Object", _table(rows))


def _caps_of(cap: Cap) -> list[tuple[str, str]]:
    if isinstance(cap, UnknownCap):
        return [("Capability", str(cap))]
    found = [("Write cap", str(cap))] if writes(cap) else []
    found.append(("Read cap", str(cap.readonly())))
    verifier = cap.verifier()
    if verifier is not None:
        found.append(("Verify cap", str(verifier)))
    index = None if isinstance(cap, LitCap) else cap.storage_index
    if index is not None:
        found.append(("Storage index", base32.encode(index)))
    return found


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{escape(a)}</th><td><code>{escape(b)}</code></td></tr>" for a, b in rows)
    return "<table>\n" + "\n".join(cells) + "\n</table>"


def upload_page(cap: Cap) -> HttpResponse:
    """Return the page after the upload of a file that no directory links to."""
    text = str(cap)
    link = f'<a href="/uri/{quote(text, safe="")}">download</a>'
    return page("Stored", f"<p><code>{escape(text)}</code></p><p>{link}</p>")


def rename_page(name: str) -> HttpResponse:
    """Return the form that renames a child."""
    shown = escape(name, quote=True)
    form = (
        '<form action="." method="post" enctype="multipart/form-data">\n'
        '<input type="hidden" name="t" value="rename">\n'
        f'<input type="hidden" name="from_name" value="{shown}">\n'
        f'<label>New name <input type="text" name="to_name" value="{shown}"></label>\n'
        '<input type="submit" value="Rename">\n</form>'
    )
    return page(f"Rename {name}", form)

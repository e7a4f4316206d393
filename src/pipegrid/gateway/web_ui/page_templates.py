"""
Pages from Jinja2 templates. All values in pages are escaped, so content from the grid never runs as a script.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

import attrs
import jinja2

from pipegrid.core.text import amount, counted, printable
from pipegrid.gateway.http_response import HttpResponse, WebError, plain_problem
from pipegrid.gateway.web_ui.assets import asset_path

HTML = "text/html"
"""The media type as Tahoe-LAFS sends it. Pages are ASCII, so browsers cannot guess another encoding."""

CONTENT_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of all pages. Browsers must not store pages, since they contain caps."""

NAVIGATION = (("/", "Grid"), ("/status", "Transfers"))
"""Links at the top of every page, as path and text."""

SHOWN_CHARACTERS = 160
"""Maximum length of a name in a list; longer names are shortened in the middle."""


def render_page(template: str, values: Mapping[str, Any], status: int = 200) -> HttpResponse:
    """
    Return a page made from a template.

    Args:
        template: a file in ``templates``, such as ``directory.html``; it extends ``base.html``.
        values: the template's variables, by name; ``title`` is required, and must contain no cap.
    """
    text = _environment().get_template(template).render(values)
    return HttpResponse(text.encode("ascii", "xmlcharrefreplace"), status, HTML, PAGE_HEADERS)


def notice_page(title: str, lines: Sequence[str]) -> HttpResponse:
    """Return a short page with a heading, and with each line as a paragraph."""
    return render_page("lines.html", {"title": title, "lines": lines})


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipegrid.gateway.web_ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(asset=asset_path, navigation=NAVIGATION, counted=counted)
    environment.filters.update(
        amount=amount, date=shown_date, name=shown_name, quoted=quoted, millis=shown_millis
    )
    return environment


# Template filters, which format values for people.


def quoted(text: str) -> str:
    """Return a name or cap, percent-encoded for one part of a URL's path or for a value in its query."""
    return quote(text, safe="")


def shown_name(name: str) -> str:
    """Return a name for a list: shortened if long, with control characters and direction marks escaped."""
    if len(name) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        name = f"{name[:half]}\u2026{name[-half:]}"
    return printable(name)


_LAST_S = 253_402_300_799
"""The end of the year 9999, in seconds since 1970."""


def as_time(value: object) -> float | None:
    """
    Return a time from metadata, in seconds since 1970; None if the value is not a number, or has no date.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_LAST_S // 5 <= value <= _LAST_S else None


def shown_date(seconds: float | None) -> str:
    """Return a time as date and minute in UTC; empty if ``seconds``, counted since 1970, is None."""
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def shown_millis(seconds: float | None) -> str:
    """Return a duration in milliseconds as text; empty if it is None."""
    if seconds is None:
        return ""
    millis = seconds * 1000
    if millis < 0.1:
        return "< 0.1 ms"
    return f"{millis:.0f} ms" if millis >= 10 else f"{millis:.1f} ms"


# Errors, as browsers show them.

_HEADINGS = {
    403: "Not allowed",
    404: "Not found",
    409: "Not possible at present",
    410: "Too few shares are left",
    413: "Too large",
    503: "Too few servers",
    507: "Not enough space",
}
_FOR_PROGRAMS = re.compile(
    r"[A-Z][A-Za-z]{2,40}Error: (?:ran out of shares: [^:]{0,400}: |no shares \(need [0-9]{1,3}\): )?"
)
"""The part of an error that only programs look for, which precedes the sentence for people."""


def problem_response(http: Any, problem: WebError) -> HttpResponse:
    """Return the response for an error: a page for browsers, text for other clients."""
    if "text/html" not in (http.getHeader("accept") or ""):
        return plain_problem(http, problem)
    values = {
        "title": _HEADINGS.get(problem.status, "This did not work"),
        "text": plain_sentence(str(problem)),
        "back": way_back(http.method, http.path),
    }
    page = render_page("error.html", values, problem.status)
    return attrs.evolve(page, headers={**problem.headers, **page.headers})


def plain_sentence(text: str) -> str:
    """Return the text of an error as a sentence, without the words that only programs look for."""
    text = _FOR_PROGRAMS.sub("", text.strip(), count=1)
    text = text.replace("No such child: ", "there is no entry of this name: ", 1)
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def way_back(method: bytes, path: bytes) -> str:
    """Return the path to which an error's page links: the directory of the object, or the first page."""
    parts = path.decode("ascii", "replace").strip("/").split("/")
    if parts[0] not in ("uri", "cap") or len(parts) < 2:
        return "/"
    if method in (b"GET", b"HEAD"):
        parts.pop()
    if len(parts) < 2:
        return "/"
    return quote(f"/{'/'.join(parts)}/", safe="/%:")

"""A browser without scripts: it opens pages, follows their links, and fills in their forms."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit, urlunsplit

import attrs

HOST = "127.0.0.1:3456"
BASE = f"http://{HOST}"
MOST_REDIRECTS = 5

_VOID = frozenset(
    [
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "source",
        "track",
        "wbr",
    ]
)  # elements without an end tag
_CLOSED = frozenset(
    [
        "a",
        "button",
        "details",
        "div",
        "form",
        "h1",
        "h2",
        "main",
        "nav",
        "ol",
        "section",
        "summary",
        "table",
        "ul",
    ]
)


@attrs.define(eq=False)
class Node:
    """
    An element of a page.

    Attributes:
        children: elements and text, in their order.
    """

    tag: str
    attributes: dict[str, str]
    children: list[Node | str] = attrs.field(factory=list)
    parent: Node | None = attrs.field(default=None, repr=False)

    @property
    def text(self) -> str:
        """All text in it, with single spaces."""
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return " ".join(" ".join(parts).split())

    def all(self, tag: str = "", **attributes: str) -> Iterator[Node]:
        """Yield the elements in it with a tag and these attributes (``class_`` is one of the classes)."""
        for child in self.children:
            if isinstance(child, str):
                continue
            if tag in ("", child.tag) and child.has(attributes):
                yield child
            yield from child.all(tag, **attributes)

    def has(self, attributes: Mapping[str, str]) -> bool:
        """Return whether it has these attributes."""
        return all(
            value in self.attributes.get("class", "").split()
            if name == "class_"
            else self.attributes.get(name.replace("_", "-")) == value
            for name, value in attributes.items()
        )

    def one(self, tag: str = "", **attributes: str) -> Node:
        """Return the only such element."""
        found = list(self.all(tag, **attributes))
        assert len(found) == 1, f"{len(found)} elements {tag} {attributes} in {self.text[:500]}"
        return found[0]


class _TreeBuilder(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.here = Node("", {})
        self.unclosed: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attributes}, parent=self.here)
        self.here.children.append(node)
        if tag not in _VOID:
            self.here = node

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.here.tag != tag and self.here.parent is not None:
            if self.here.tag in _CLOSED:
                self.unclosed.append(self.here.tag)
            self.here = self.here.parent
        if self.here.parent is None:
            self.unclosed.append(f"/{tag}")
            return
        self.here = self.here.parent

    def handle_data(self, data: str) -> None:
        self.here.children.append(data)


def parse_page(text: str) -> Node:
    """Return the elements of a page; raises AssertionError where one has no end."""
    builder = _TreeBuilder()
    builder.feed(text)
    builder.close()
    assert not builder.unclosed, f"not closed, or not open: {builder.unclosed}"
    return builder.root


@attrs.frozen
class HttpAnswer:
    """What a gateway answered to one request."""

    status: int
    headers: dict[str, str]
    body: bytes = attrs.field(repr=False)
    url: str = ""


Send = Callable[[bytes], HttpAnswer]
"""Sends the bytes of a request, and returns the response."""


def parse_answer(data: bytes) -> HttpAnswer:
    """Return a response from its bytes."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return HttpAnswer(int(first.split()[1]), headers, body)


class PageBrowser:
    """
    A browser with one window.

    Attributes:
        url: of the page that is shown.
        answer: the response that brought it.
        page: its elements.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.url = f"{BASE}/"
        self.answer = HttpAnswer(0, {}, b"")
        self.page = Node("", {})

    @property
    def path(self) -> str:
        """The path and query of the page that is shown."""
        parts = urlsplit(self.url)
        return urlunsplit(("", "", parts.path, parts.query, ""))

    @property
    def text(self) -> str:
        """What the page says."""
        return self.page.one("main").text

    @property
    def message(self) -> str:
        """What the page says of the last action."""
        return " ".join(node.text for node in self.page.all(role="status"))

    def open(self, target: str, **headers: str) -> PageBrowser:
        """Open a page by its URL, relative to the one that is shown."""
        return self._load("GET", target, {}, b"", headers)

    def follow(self, text: str, within: Node | None = None) -> PageBrowser:
        """Follow the link with this text."""
        return self.open(self.link(text, within))

    def link(self, text: str, within: Node | None = None) -> str:
        """Return the target of the link with this text, or with this label."""
        found = [
            node.attributes["href"]
            for node in (within or self.page).all("a")
            if text in (node.text, node.attributes.get("aria-label"))
        ]
        assert len(set(found)) == 1, (
            f"{len(found)} links {text!r} in {(within or self.page).text[:800]}"
        )
        return found[0]

    def row(self, name: str) -> Node:
        """Return the row of a table whose header has this text."""
        found = [
            row
            for row in self.page.all("tr")
            if any(head.text == name for head in row.all("th", scope="row"))
        ]
        assert len(found) == 1, f"{len(found)} rows {name!r} in {self.text[:800]}"
        return found[0]

    def form(self, button: str) -> Node:
        """Return the form with this button."""
        found = [
            form
            for form in self.page.all("form")
            if any(button == each.text for each in form.all("button"))
        ]
        assert len(found) == 1, f"{len(found)} forms {button!r} in {self.text[:800]}"
        return found[0]

    def check(self, button: str, name: str) -> PageBrowser:
        """Check a box of the form with this button."""
        [box] = self.form(button).all("input", type="checkbox", name=name)
        box.attributes["checked"] = ""
        return self

    def submit(self, button: str, *files: tuple[str, bytes], **fields: str) -> PageBrowser:
        """
        Fill in the fields of the form with this button, and press it.

        The files are chosen in its last field for files; the others send an empty one.
        """
        form = self.form(button)
        values: dict[str, str] = {}
        for name, value in form_values(form):
            values.setdefault(name, value)
        unknown = fields.keys() - values.keys()
        assert not unknown, f"the form has no fields {unknown}: {values}"
        values.update(fields)
        target = form.attributes.get("action", "") or self.url
        method = form.attributes.get("method", "get").upper()
        if method == "GET":
            return self.open(f"{target.partition('?')[0]}?{urlencode(values)}")
        headers = {"Origin": "null"}  # as Chromium has it, since pages send no referrer
        if form.attributes.get("enctype") == "multipart/form-data":
            boundary = f"----{secrets.token_hex(8)}"
            headers["Content-Type"] = f"multipart/form-data; boundary={boundary}"
            inputs = list(form.all("input", type="file"))
            body = _multipart(values, [("", b"")] * (len(inputs) - 1) + list(files), boundary)
        else:
            assert not files, "this form does not send a file"
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            body = urlencode(values).encode("ascii")
        return self._load("POST", target, headers, body, {})

    def _load(
        self, method: str, target: str, own: dict[str, str], body: bytes, given: Mapping[str, str]
    ) -> PageBrowser:
        for _ in range(MOST_REDIRECTS):
            url = urljoin(self.url, target).partition("#")[0]
            assert url.startswith(BASE), f"{url} leads to another site"
            self.answer = self._request(method, url, own, body, given)
            self.url = url
            if self.answer.status not in (301, 302, 303):
                break
            target, method, own, body = self.answer.headers["location"], "GET", {}, b""
        kind = self.answer.headers.get("content-type", "")
        is_page = kind.startswith("text/html")
        self.page = parse_page(self.answer.body.decode("utf-8")) if is_page else Node("", {})
        return self

    def _request(
        self, method: str, url: str, own: dict[str, str], body: bytes, given: Mapping[str, str]
    ) -> HttpAnswer:
        headers = {
            "Host": HOST,
            "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            "Sec-Fetch-Site": "same-origin",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
            "Connection": "close",
            **own,
            **{name.replace("_", "-"): value for name, value in given.items()},
        }
        if method == "POST":
            headers["Content-Length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        target = url.removeprefix(BASE)
        assert re.fullmatch(r"[!-~]*", target), f"{target!r} is not the ASCII of a URL"
        return self._send(f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body)


def form_values(form: Node) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a form as it is shown."""
    action = form.attributes.get("action", "")
    if form.attributes.get("method", "get").upper() == "GET":
        yield from parse_qsl(urlsplit(action).query)
    for node in form.all():
        name = node.attributes.get("name")
        if name is None or node.attributes.get("type") == "file":
            continue
        if node.tag == "select":
            options = list(node.all("option"))
            chosen = [option for option in options if "selected" in option.attributes] or options
            yield name, chosen[0].attributes.get("value", chosen[0].text)
        elif node.tag == "textarea":
            yield name, "".join(child for child in node.children if isinstance(child, str))
        elif node.tag == "input":
            if node.attributes.get("type") in ("checkbox", "radio"):
                if "checked" not in node.attributes:
                    continue
                yield name, node.attributes.get("value", "on")
            else:
                yield name, node.attributes.get("value", "")


def _multipart(
    values: Mapping[str, str], files: Sequence[tuple[str, bytes]], boundary: str
) -> bytes:
    parts = []
    for name, value in values.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(head.encode() + value.encode() + b"\r\n")
    for name, data in files:
        shown = name.replace('"', "%22")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{shown}"\r\n'
        )
        parts.append(
            f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + data + b"\r\n"
        )
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def page_faults(root: Node) -> list[str]:
    """Return what in a page would keep people from using it: each is a rule of WCAG 2.2, level A or AA."""
    found = []
    [html] = root.all("html")
    if not html.attributes.get("lang"):
        found.append("the page has no language")
    if len(list(root.all("h1"))) != 1 or len(list(root.all("main"))) != 1:
        found.append("the page has not one h1 and one main")
    levels = [int(node.tag[1]) for node in root.all() if re.fullmatch("h[1-6]", node.tag)]
    if any(b > a + 1 for a, b in zip([0, *levels], levels, strict=False)):
        found.append(f"headings leave out a level: {levels}")
    ids = [node.attributes["id"] for node in root.all() if "id" in node.attributes]
    found += [f"the id {each} is there twice" for each in set(ids) if ids.count(each) > 1]
    labels = {node.attributes.get("for") for node in root.all("label")}
    for node in root.all():
        name = node.attributes.get("aria-label", "").strip() or node.text
        if node.tag in ("input", "select", "textarea"):
            if node.attributes.get("type") == "hidden":
                continue
            inside = any(each.tag == "label" for each in _above(node))
            if not (
                inside or node.attributes.get("id") in labels or "aria-label" in node.attributes
            ):
                found.append(f"{node.attributes} has no label")
        elif node.tag in ("a", "button", "summary", "th", "caption") and not name:
            found.append(f"{node.tag} {node.attributes} has no text")
        elif node.tag == "img" and "alt" not in node.attributes:
            found.append(f"{node.attributes} has no alt")
        elif node.tag == "th" and "scope" not in node.attributes:
            found.append(f"the header {name} has no scope")
        elif node.tag == "table" and not list(node.all("caption")):
            found.append("a table has no caption")
        if "style" in node.attributes or any(each.startswith("on") for each in node.attributes):
            found.append(f"{node.tag} has a style or script of its own: {node.attributes}")
        if node.attributes.get("for", "") not in ("", *ids):
            found.append(f"the label {name} belongs to nothing")
    return found


def _above(node: Node) -> Iterator[Node]:
    while node.parent is not None:
        node = node.parent
        yield node

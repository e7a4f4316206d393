"""URLs of pages and of files' contents, and the messages that pages show after an action."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlencode

import attrs

from pipegrid.core.caps import Cap, parse_cap
from pipegrid.core.text import CAP_STARTS, as_pasted
from pipegrid.gateway.http_response import WebError
from pipegrid.gateway.web_api.api_request import ApiRequest
from pipegrid.gateway.web_api.object_json import read_cap_text

_NO_PATH = frozenset({"", ".", ".."})
"""Names of children that browsers remove from a path."""

DONE = {
    "made": "The directory was made.",
    "uploaded": "The file was uploaded.",
    "all-uploaded": "The files were uploaded.",
    "replaced": "The file has its new content.",
    "renamed": "The entry has its new name.",
    "moved": "The entry was moved.",
    "deleted": "The entry was deleted.",
    "linked": "The capability has a name in this directory now.",
    "created": (
        "This is a new directory. Keep its address or its write cap: nothing else leads back to it."
    ),
    "stored": "The file was stored. Keep its address or its cap: nothing else leads back to it.",
}
"""Messages that a page shows after an action, by the argument ``done`` of the page's URL."""


@attrs.frozen
class ObjectPath:
    """
    The path of an object's page: a cap, then names.

    Attributes:
        cap: the cap as text.
        names: the names that follow the cap.
    """

    cap: str
    names: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The path of the page, quoted, without a final slash."""
        return "/uri/" + "/".join(quote(part, safe="") for part in (self.cap, *self.names))

    @property
    def directory_url(self) -> str:
        """The path of the page if the object is a directory: with a final slash."""
        return f"{self.url}/"

    @property
    def name(self) -> str:
        """The last name; empty if no names follow the cap."""
        return self.names[-1] if self.names else ""

    @property
    def parent(self) -> ObjectPath:
        """The path of the directory that contains the object."""
        return attrs.evolve(self, names=self.names[:-1])

    def child(self, name: str, cap: Cap | None) -> ObjectPath | None:
        """
        Return the path of a child; None: the name cannot be in a path, and the child's cap is not known.
        """
        if name not in _NO_PATH:
            return attrs.evolve(self, names=(*self.names, name))
        return None if cap is None else ObjectPath(str(cap))

    def trail(self) -> list[tuple[str, str]]:
        """Return names and paths of the directories above the object, the outermost first."""
        above = ("Directory", *self.names)[: len(self.names)]
        return [
            (name, attrs.evolve(self, names=self.names[:depth]).directory_url)
            for depth, name in enumerate(above)
        ]

    def back_to(self, done: str) -> str:
        """Return the URL of this directory's page that shows the message ``done``; see ``DONE``."""
        return f"{self.directory_url}?done={done}"


def object_path(call: ApiRequest) -> ObjectPath:
    """Return the path of the object that a request names."""
    names: Sequence[str] = call.names[2:]
    if names and not names[-1]:
        names = names[:-1]
    return ObjectPath(call.names[1], tuple(names))


def content_url(cap: Cap, name: str, save: bool = False) -> str:
    """
    Return the URL of a file's content, with the file's own read cap, so that the URL does not reveal the
    directory's cap.

    Args:
        save: whether the browser saves the file instead of showing it.
    """
    read = quote(read_cap_text(cap), safe="")
    place = f"/uri/{read}" if name in _NO_PATH else f"/named/{read}/{quote(name, safe='')}"
    return place + ("?save=true" if save else "")


def share_url(cap: Cap, name: str) -> str:
    """Return the URL of the page that shares an object; it contains only the read cap."""
    query = {"t": "share", **({"filename": name} if name else {})}
    return f"/uri/{quote(read_cap_text(cap), safe='')}?{urlencode(query)}"


def opened_url(text: str) -> str:
    """
    Return the URL of the page of an object, from pasted text: a cap, a cap with a path, or a URL.

    Raises:
        WebError, CapError: the text is none of these.
    """
    cap, *names = as_pasted(text).split("/")
    if not cap.startswith(CAP_STARTS):
        raise WebError(
            400, "this is not a capability, which begins with URI: and has no spaces; copy it whole"
        )
    parse_cap(cap)
    return f"{ObjectPath(cap, tuple(name for name in names if name)).url}?t=open"


def message(call: ApiRequest) -> str:
    """Return the message that a page shows about the previous action; empty if there is none."""
    return DONE.get(call.arguments.text("done"), "")

"""Where pages are: the paths of objects and of their content, and what a page says after an action."""

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
"""Names of children that browsers do not keep in a path."""

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
"""What a page says after an action, by the argument ``done`` of the place where a form leads."""


@attrs.frozen
class ObjectPath:
    """
    The path of an object's page.

    Attributes:
        cap: as text, the first part.
        names: those that follow it.
    """

    cap: str
    names: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Its path, quoted, without a final slash."""
        return "/uri/" + "/".join(quote(part, safe="") for part in (self.cap, *self.names))

    @property
    def directory_url(self) -> str:
        """The same as that of a directory."""
        return f"{self.url}/"

    @property
    def name(self) -> str:
        """The last name; empty for a capability alone."""
        return self.names[-1] if self.names else ""

    @property
    def parent(self) -> ObjectPath:
        """The path of its directory."""
        return attrs.evolve(self, names=self.names[:-1])

    def child(self, name: str, cap: Cap | None) -> ObjectPath | None:
        """Return the path of a child; None: its name has none, and its cap is not known."""
        if name not in _NO_PATH:
            return attrs.evolve(self, names=(*self.names, name))
        return None if cap is None else ObjectPath(str(cap))

    def trail(self) -> list[tuple[str, str]]:
        """Return the directories above it with their paths, the outermost first."""
        above = ("Directory", *self.names)[: len(self.names)]
        return [
            (name, attrs.evolve(self, names=self.names[:depth]).directory_url)
            for depth, name in enumerate(above)
        ]

    def back_to(self, done: str) -> str:
        """Return the URL of this directory's page, which will show the message ``done``."""
        return f"{self.directory_url}?done={done}"


def object_path(call: ApiRequest) -> ObjectPath:
    """Return the path that a request asks for."""
    names: Sequence[str] = call.names[2:]
    if names and not names[-1]:
        names = names[:-1]
    return ObjectPath(call.names[1], tuple(names))


def content_url(cap: Cap, name: str, save: bool = False) -> str:
    """
    Return where a file's content is, by its read cap alone, so that it does not see that of its directory.

    Args:
        save: the browser is to save it.
    """
    read = quote(read_cap_text(cap), safe="")
    place = f"/uri/{read}" if name in _NO_PATH else f"/named/{read}/{quote(name, safe='')}"
    return place + ("?save=true" if save else "")


def share_url(cap: Cap, name: str) -> str:
    """Return the page that shares an object by its read cap alone."""
    query = {"t": "share", **({"filename": name} if name else {})}
    return f"/uri/{quote(read_cap_text(cap), safe='')}?{urlencode(query)}"


def opened_url(text: str) -> str:
    """
    Return where the page of an object is that a person has pasted: a cap, a path below one, or a URL.

    Raises:
        WebError, CapError: it is none of these.
    """
    cap, *names = as_pasted(text).split("/")
    if not cap.startswith(CAP_STARTS):
        raise WebError(
            400, "this is not a capability, which begins with URI: and has no spaces; copy it whole"
        )
    parse_cap(cap)
    return f"{ObjectPath(cap, tuple(name for name in names if name)).url}?t=open"


def message(call: ApiRequest) -> str:
    """Return what a page says of the action before it; empty: nothing."""
    return DONE.get(call.arguments.text("done"), "")

"""Refuses requests that pages of other sites make a browser send; decides by the head of each request."""

from __future__ import annotations

import re
from collections.abc import Collection

SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_HOST = re.compile(
    rb"(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?\Z"
)


def refusal(
    method: bytes,
    hosts: list[bytes],
    origins: list[bytes],
    fetch_sites: list[bytes],
    fetch_mode: bytes,
    known: Collection[str],
) -> str | None:
    """
    Return why a request is refused; None: it is accepted.

    A page of another site can make a browser send requests to the gateway. Three rules protect the gateway:

    * A ``Host`` that is not a name of the gateway is refused, so an attacker cannot make another name resolve
      to the gateway (DNS rebinding).
    * A request that changes something is refused if ``Origin`` or ``Sec-Fetch-Site`` names another site.
    * A page of another site may link to the gateway, but cannot embed anything from it.

    Programs other than browsers do not send ``Origin`` and ``Sec-Fetch-*``.

    Args:
        hosts, origins, fetch_sites: all values of ``Host``, ``Origin`` and ``Sec-Fetch-Site``.
        fetch_mode: the value of ``Sec-Fetch-Mode``.
        known: names of the gateway, in lower case, in addition to those of loopback.
    """
    if len(hosts) > 1:
        return "the request has several Host headers"
    if hosts and host_name(hosts[0]) not in LOOPBACK | frozenset(known):
        return (
            "the gateway does not serve the name in the Host header; use its address in node.url, or start "
            "it with --host NAME"
        )
    foreign_site = any(site not in (b"same-origin", b"none") for site in fetch_sites)
    if method in SAFE_METHODS:
        if foreign_site and fetch_mode not in (b"navigate", b""):
            return "a page of another site may link to the gateway, but not load anything from it"
        return None
    host = hosts[0].lower() if hosts else b""
    own = [b"http://" + host, b"https://" + host]
    if fetch_sites and not foreign_site:
        # Forms of the gateway's own pages send ``Origin: null``, since these pages send no referrer.
        own.append(b"null")
    if foreign_site or any(origin.lower() not in own for origin in origins):
        return "a page of another site may not change anything through the gateway"
    return None


def host_name(value: bytes) -> str | None:
    """Return the name or address in a ``Host`` header, in lower case; None if the header is malformed."""
    match = _HOST.match(value.strip())
    if match is None:
        return None
    return (match["six"] or match["name"]).decode("ascii").lower().rstrip(".")

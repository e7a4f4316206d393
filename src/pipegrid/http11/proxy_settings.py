"""
The proxy for a host, from the environment, read as curl reads it. Pure.

A proxy speaks HTTP or SOCKS5. With ``socks5h``, the proxy looks up all names. ``socks5``, with which curl
looks up names itself, is refused.

``http_proxy`` is for http, ``https_proxy`` for https, ``all_proxy`` for both; hosts in ``no_proxy`` are
connected directly. All but ``http_proxy`` may be in capitals: a web server sets ``HTTP_PROXY`` for its
scripts from the ``Proxy:`` header of any request.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

import attrs

from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import (
    ProxyAddress,
    ProxyWay,
    is_overlay_name,
    parse_proxy_address,
)

PORTS = {"http": 80, "https": 443, "socks5h": 1080}


@attrs.frozen
class Proxy:
    """
    A proxy, and the credentials for it.

    Attributes:
        scheme: how to connect to the proxy: http, https or socks5h.
        login: user name and password for a SOCKS5 proxy; empty: none. Not in ``repr``.
        authorization: a whole header line for the proxy, with its line end; b"": none. Not in ``repr``.
    """

    scheme: str
    host: str
    port: int
    authorization: bytes = attrs.field(default=b"", repr=False)
    login: tuple[str, str] = attrs.field(default=("", ""), repr=False)

    @property
    def socks(self) -> ProxyWay | None:
        """The way through the proxy if it speaks SOCKS5; otherwise None."""
        if self.scheme != "socks5h":
            return None
        address = ProxyAddress(self.host, self.port)
        return ProxyWay("the SOCKS proxy", (address,), False, *self.login)

    @property
    def url(self) -> str:
        """The proxy's URL for messages, without user name and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/"


def proxy_for(scheme: str, host: str, port: int, environment: Mapping[str, str]) -> Proxy | None:
    """
    Return the proxy for a host; None for a direct connection.

    Args:
        scheme: the scheme of the requested URL, http or https.

    Raises:
        UsageError: the environment names a proxy that cannot be used.
    """
    names = [
        f"{scheme}_proxy",
        "HTTPS_PROXY" if scheme == "https" else "",
        "all_proxy",
        "ALL_PROXY",
    ]
    name = next((each for each in names if environment.get(each)), None)
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if name is None or is_exempt(host, port, exempt):
        return None
    return read_proxy(environment[name], name)


def read_proxy(url: str, name: str) -> Proxy:
    """
    Parse a proxy's URL; the default scheme is http.

    Args:
        name: the name of the variable or argument with the URL, for errors.

    Raises:
        UsageError: the text is not the URL of a proxy, or the proxy is of another kind.
    """
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(f"{name} is not the URL of a proxy; give http://HOST:PORT/") from None
    if parts.scheme in ("socks5", "socks4", "socks4a", "socks"):
        raise UsageError(
            f"{name} is not the URL of a proxy that can be used: {parts.scheme} looks up names here, which "
            "reveals them; give socks5h://HOST:PORT"
        )
    if parts.scheme not in PORTS or not parts.hostname or not parts.hostname.isascii():
        raise UsageError(
            f"{name} is not the URL of a proxy that can be used; give http://HOST:PORT/, https:// or "
            "socks5h://"
        )
    if parts.scheme == "socks5h":
        return _socks_proxy(parts, port or PORTS["socks5h"], name)
    authorization = b""
    if parts.username is not None:
        words = unquote_to_bytes(parts.username) + b":" + unquote_to_bytes(parts.password or "")
        authorization = b"Proxy-Authorization: Basic %s\r\n" % b64encode(words)
    return Proxy(parts.scheme, parts.hostname, port or PORTS[parts.scheme], authorization)


def _socks_proxy(parts: SplitResult, port: int, name: str) -> Proxy:
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    try:
        address = parse_proxy_address(f"{host}:{port}")
    except ValueError as error:
        raise UsageError(f"{name} is {parts.scheme}://{host}:{port}, and {error}") from None
    login = tuple(
        unquote_to_bytes(each or "").decode("utf-8", "replace")
        for each in (parts.username, parts.password)
    )
    if any(len(each.encode("utf-8")) > 255 for each in login):
        raise UsageError(f"{name} has a user name or password of more than 255 bytes; correct it")
    return Proxy("socks5h", address.host, address.port, login=(login[0], login[1]))


def check_resolvable(host: str) -> None:
    """
    Check that a host name may be looked up without Tor.

    Raises:
        UsageError: the name exists only in Tor or I2P.
    """
    if is_overlay_name(host):
        raise UsageError(
            f"only Tor or I2P know {host}, and it is not looked up without them; give the proxy, such as "
            "ALL_PROXY=socks5h://127.0.0.1:9050"
        )


def is_exempt(host: str, port: int, exempt: str) -> bool:
    """
    Return whether a host is connected directly.

    Args:
        exempt: rules, separated by commas or spaces. A rule is a name (for all names below it as well),
            ``HOST:PORT``, an address, a network such as ``10.0.0.0/8``, or ``*``.
    """
    host = host.lower().rstrip(".")
    return any(_fits(host, port, each) for each in exempt.lower().replace(",", " ").split())


def _fits(host: str, port: int, rule: str) -> bool:
    if rule == "*":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if address is not None:
        try:
            return address in ip_network(rule.strip("[]"), strict=False)
        except ValueError:
            pass  # the rule may have a port
    name, colon, number = rule.rpartition(":")
    if colon and number.isdigit():
        if int(number) != port:
            return False
        rule = name
    rule = rule.strip("[]").removeprefix("*").strip(".")
    return bool(rule) and (host == rule or (address is None and host.endswith("." + rule)))

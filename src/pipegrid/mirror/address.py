"""
Where a mirror is, how it is asked, and what stands in a request for one of its files. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pipegrid.errors import UsageError
from pipegrid.mirror.sprint.headstart import plain_url
from pipegrid.mirror.value import Value
from pipegrid.mirror.wanted import quoted
from pipegrid.version import __version__

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from pipegrid.http11.proxies import Proxy

_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._~+:@!$&'()*,;=-]+")
_SAFE = "/~+:@!$&'()*,;="


class Address(Value):
    """
    Where a mirror is.

    Attributes:
        prefix: of every request's target, ending in ``/``.
        proxy: who is asked in its place.
        headers: further lines of every request, each with its end.
    """

    __slots__ = ("headers", "host", "netloc", "port", "prefix", "proxy", "scheme", "url")

    def __init__(
        self,
        url: str,
        scheme: str,
        host: str,
        port: int,
        prefix: bytes,
        netloc: bytes,
        proxy: Proxy | None = None,
        headers: bytes = b"",
    ) -> None:
        self.url = url
        self.scheme = scheme
        self.host = host
        self.port = port
        self.prefix = prefix
        self.netloc = netloc
        self.proxy = proxy
        self.headers = headers

    @property
    def place(self) -> tuple[bytes, int]:
        """Host and port, as they are looked up; text would be looked at for IDNA, with tables for that."""
        return self.host.encode("ascii"), self.port


def parse_url(url: str) -> Address:
    """
    Take a mirror's URL apart.

    Raises:
        UsageError: it is none of http or https, has no host, or a user, a query, or a fragment.
    """
    plain = plain_url(url)
    if plain is not None:
        scheme, host, known_port, path = plain
        netloc = url.split("/", 3)[2].encode("ascii")
        prefix = f"/{path}".rstrip("/") + "/"
        return Address(url, scheme, host, known_port, prefix.encode("ascii"), netloc)
    return _look_closely(url)


def _look_closely(url: str) -> Address:
    from urllib.parse import (
        quote,
        urlsplit,
    )  # a millisecond and a half, which plain ones need not spend

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{quoted(url)} is not the URL of a mirror ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{quoted(url)} is not the URL of a mirror; give http://HOST/PATH or https://"
        )
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"{quoted(url)}: the URL of a mirror has no user, query or fragment; give http://HOST/PATH"
        )
    path = quote(parts.path.rstrip("/") + "/", safe=_SAFE + "%")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    try:
        netloc = parts.netloc.encode("ascii")
    except UnicodeEncodeError:
        raise UsageError(f"{quoted(url)}: give the host's name in ASCII (xn--…)") from None
    return Address(url, parts.scheme, parts.hostname, port, path.encode("ascii"), netloc)


def through(address: Address, environment: Mapping[str, str]) -> Address:
    """
    Return how a mirror is asked: by the proxy of the environment, if there is one for it.

    Of a mirror over http a proxy is asked for the whole URL; to one over https it makes a way, and sees
    nothing.

    Raises:
        UsageError: the environment names something else than a proxy.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return address
    from pipegrid.http11.proxies import proxy_for  # which few need

    proxy = proxy_for(address.scheme, address.host, address.port, environment)
    if proxy is None or address.scheme == "https":
        return address.but(proxy=proxy)
    prefix = b"http://%s%s" % (address.netloc, address.prefix)
    return address.but(proxy=proxy, prefix=prefix, headers=proxy.authorization)


def target_of(address: Address, path: str) -> bytes:
    """
    Return what stands in a request for a path below a mirror.

    A plus sign is escaped, as apt and dnf do it: stores such as S3 take one that is not for a blank.
    """
    if _PLAIN_PATH.fullmatch(path) is None:
        from urllib.parse import quote

        path = quote(path, safe=_SAFE)
    if "+" in path:
        path = path.replace("+", "%2B")
    return address.prefix + path.encode("ascii")


def small_request(address: Address, path: str) -> bytes:
    """Return a request for a small file that everything begins with, and that no cache is to answer."""
    return (
        b"GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: pipegrid/%s\r\nCache-Control: max-age=0\r\n%s\r\n"
        % (
            target_of(address, path),
            address.netloc,
            __version__.encode("ascii"),
            address.headers,
        )
    )


def head_tail(address: Address) -> bytes:
    """Return what stands behind the target in every request, with the empty line at its end."""
    return (
        b" HTTP/1.1\r\nHost: %s\r\nUser-Agent: pipegrid/%s\r\nAccept-Encoding: identity\r\n%s\r\n"
        % (address.netloc, __version__.encode("ascii"), address.headers)
    )

"""The addresses of mirrors, and where and how each file is requested. Without input or output."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import Value, quoted
from pipegrid.mirror.preconnect_mirrors import is_overlay_host, plain_url
from pipegrid.version import __version__

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import

if TYPE_CHECKING:
    from typing import Protocol

    from pipegrid.http11.proxy_settings import Proxy
    from pipegrid.mirror.credentials import TlsFiles

    class LearntRedirects(Protocol):
        """What a run has learnt from redirects; see ``redirects.RedirectTable``."""

        def follow(self, route: FileRoute, locations: Sequence[bytes]) -> FileRoute:
            """Return where a redirect leads. Raises: RedirectRefused: the redirect is not followed."""

        def route_of(self, url: str) -> FileRoute | None:
            """Return where a URL is expected to be served; None if no rule is known."""

        def served(self, url: str) -> None:
            """Record that a host has served this URL without a redirect."""

        def forget(self, rule: str) -> None:
            """Drop a rule that was wrong; neither this rule nor a more general one is made again."""

        def forget_host(self, address: Address) -> None:
            """Drop the rules that lead to a host that was given up."""


_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._~+:@!$&'()*,;=-]+")
_SAFE = "/~+:@!$&'()*,;="


_PORTS = {"http": 80, "https": 443}


class HostAccess:
    """
    Proxies, credentials and TLS files for all hosts of a run: mirrors, and hosts that mirrors redirect to.

    Args:
        environment: names proxies.
        credentials: returns the header line for a URL, or b""; None: there are no credentials.
        tls: the certificate authorities, and the client's certificate; None: the system's authorities, and no
            certificate.

    Attributes:
        redirects: what the run has learnt from redirects; None if there was none.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        credentials: Callable[[str], bytes] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.tls = tls
        self._environment = environment
        self._credentials = credentials
        self._users: dict[str, bytes] = {}
        self.redirects: LearntRedirects | None = None

    def header_for(self, url: str) -> bytes:
        """
        Return the header line with the credentials for a URL, including its line end; b"" if there are none.

        A user in a mirror's URL is used for all paths of the host, as in curl. If there is no such user, the
        credentials for the URL are returned.
        """
        if self._users:
            header = self._users.get(parse_url(url.partition("?")[0]).origin, b"")
            if header:
                return header
        return b"" if self._credentials is None else self._credentials(url)

    def address(self, url: str, asked: str | None = None) -> Address:
        """
        Return the address of a URL, with the user in the URL or the credentials for it.

        Args:
            asked: the URL for which to look up credentials, if it differs from ``url``.

        Raises:
            UsageError: as for ``parse_url`` and ``through``.
        """
        header = b""
        if "@" in url:
            from pipegrid.mirror.credentials import user_of  # few runs need this module

            url, header = user_of(url)
            origin = parse_url(url).origin
            same = self._users.get(origin, header) == header
            # If several users are given for a host, none of them is used for all paths.
            self._users[origin] = header if same else b""
        header = header or self.header_for(asked or url)
        address = through(parse_url(url), self._environment)
        return address.replaced(access=self, headers=address.headers + header)


class Address(Value):
    """
    The address of a mirror.

    Attributes:
        prefix: the beginning of every request's target, ending in ``/``.
        proxy: the proxy that gets the requests; None: the host itself gets them.
        headers: further header lines of every request, each with its line end; left out of ``repr``.
        access: shared by all hosts of a run.
    """

    __slots__ = ("access", "headers", "host", "netloc", "port", "prefix", "proxy", "scheme", "url")

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
        access: HostAccess | None = None,
    ) -> None:
        self.access = access or HostAccess({})
        self.url = url
        self.scheme = scheme
        self.host = host
        self.port = port
        self.prefix = prefix
        self.netloc = netloc
        self.proxy = proxy
        self.headers = headers

    def __repr__(self) -> str:
        return f"<Address {self.base_url}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and all(
            getattr(self, name) == getattr(other, name)
            for name in self.__slots__
            if name != "access"
        )

    def __hash__(self) -> int:
        return hash(self.url)

    @property
    def origin(self) -> str:
        """Scheme, host and port, in the simplest form: equal for addresses that can share connections."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def base_url(self) -> str:
        """The part of every file's URL before the file's path."""
        path = self.prefix.decode("ascii")
        if path.startswith("http://"):
            path = path[path.index("/", len("http://")) :]
        return self.origin + path

    @property
    def place(self) -> tuple[bytes, int]:
        """
        Host and port for the name lookup. The host is bytes, since for text Python would load the tables of
        IDNA.
        """
        return self.host.encode("ascii"), self.port


def parse_url(url: str) -> Address:
    """
    Parse a mirror's URL.

    Raises:
        UsageError: the URL is neither http nor https, has no host, or has a user, a query, or a fragment.
    """
    plain = plain_url(url)
    if plain is not None:
        scheme, host, known_port, path = plain
        netloc = url.split("/", 3)[2].encode("ascii")
        prefix = f"/{path}".rstrip("/") + "/"
        return Address(url, scheme, host, known_port, prefix.encode("ascii"), netloc)
    return _look_closely(url)


def _look_closely(url: str) -> Address:
    # Simple URLs do not get here, since the import of this parser takes a millisecond and a half.
    from urllib.parse import quote, urlsplit

    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{quoted(url)} is not the URL of a mirror ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{quoted(url)} is not the URL of a mirror; give http://HOST/PATH or https://"
        )
    if "@" in parts.netloc:
        raise UsageError(
            "the URL of a mirror must not contain a user name or password; give http://HOST/PATH"
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"{quoted(url)}: the URL of a mirror has no query or fragment; give http://HOST/PATH"
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
    Return the address with the proxy that the environment names for it; unchanged if there is none.

    For http the proxy gets the whole URL; for https it makes a tunnel, and sees only the host. A SOCKS5 proxy
    makes a tunnel in both cases.

    Raises:
        UsageError: the environment names something that is not a proxy; or only Tor or I2P know the host, and
            there is no SOCKS5 proxy for it.
    """
    has_proxy = any(name.lower().endswith("_proxy") for name in environment)
    if not has_proxy and not is_overlay_host(address.host):
        return address
    from pipegrid.http11.proxy_settings import check_resolvable, proxy_for  # rarely needed

    proxy = proxy_for(address.scheme, address.host, address.port, environment)
    if proxy is None or proxy.socks is None:
        check_resolvable(address.host)
    if proxy is None or proxy.socks is not None or address.scheme == "https":
        return address.replaced(proxy=proxy)
    prefix = b"http://%s%s" % (address.netloc, address.prefix)
    return address.replaced(proxy=proxy, prefix=prefix, headers=proxy.authorization)


def target_of(address: Address, path: str) -> bytes:
    """
    Return the request target for a path below a mirror.

    A plus sign is escaped, as in apt and dnf: stores such as S3 treat an unescaped plus sign as a space.
    """
    if _PLAIN_PATH.fullmatch(path) is None:
        from urllib.parse import quote

        path = quote(path, safe=_SAFE)
    if "+" in path:
        path = path.replace("+", "%2B")
    return address.prefix + path.encode("ascii")


class RedirectRefused(Exception):
    """A redirect is not followed; the text is a clause, without passwords and queries."""


class FileRoute(Value):
    """
    Where one file is requested.

    Attributes:
        address: of the host.
        target: the target in the request line.
        url: the whole URL.
        hops: how many redirects led to this URL.
        rule: the prefix whose learnt rule led to this URL without a request; None for a mirror's own URL, and
            for the URL of a redirect.
    """

    __slots__ = ("address", "hops", "rule", "target", "url")

    def __init__(
        self, address: Address, target: bytes, url: str, hops: int = 0, rule: str | None = None
    ) -> None:
        self.address = address
        self.target = target
        self.url = url
        self.hops = hops
        self.rule = rule


def own_route(address: Address, path: str) -> FileRoute:
    """Return the route of a file on the mirror itself."""
    target = target_of(address, path)
    above = len(address.prefix)
    return FileRoute(address, target, address.base_url + target[above:].decode("ascii"))


def small_request(address: Address, target: bytes) -> bytes:
    """Return a request for a small file at the beginning of a run; caches must ask the server again."""
    return b"GET %s%s" % (target, head_tail(address, b"Cache-Control: max-age=0"))


def head_tail(address: Address, field: bytes = b"Accept-Encoding: identity") -> bytes:
    """
    Return the part of a request after the target: header lines including ``field``, and the empty line at the
    end.
    """
    agent = __version__.encode("ascii")
    return b" HTTP/1.1\r\nHost: %s\r\nUser-Agent: pipegrid/%s\r\n%s\r\n%s\r\n" % (
        address.netloc,
        agent,
        field,
        address.headers,
    )

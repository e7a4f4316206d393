"""The addresses of mirrors, and where and how each file is requested (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import Value, quoted
from pipegrid.mirror.preconnect_mirrors import is_overlay_host, plain_url
from pipegrid.version import __version__

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import Protocol

    from pipegrid.http11.proxy_settings import Proxy
    from pipegrid.mirror.credentials import TlsFiles

    class LearntRedirects(Protocol):
        """What the redirects of a run have shown; see ``redirects.RedirectTable``."""

        def follow(self, route: FileRoute, locations: Sequence[bytes]) -> FileRoute:
            """Return where a redirect leads. Raises: RedirectRefused: it is not followed."""

        def route_of(self, url: str) -> FileRoute | None:
            """Return where a URL is expected; None if nothing is known."""

        def served(self, url: str) -> None:
            """A host has served this URL itself."""

        def forget(self, rule: str) -> None:
            """A rule was wrong: drop it, and do not make it or a more general one again."""

        def forget_host(self, address: Address) -> None:
            """A host is given up: drop the rules that lead there."""


_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._~+:@!$&'()*,;=-]+")
_SAFE = "/~+:@!$&'()*,;="


_PORTS = {"http": 80, "https": 443}


class HostAccess:
    """
    How hosts are asked: those of the mirrors, and those that they redirect to.

    Args:
        environment: names proxies.
        credentials: returns the header line for a URL, or b""; None: there are none.
        tls: authorities, and the client's certificate; None: the system's, and none.

    Attributes:
        redirects: what redirects have shown; None if there was none.
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
        Return the header line with the credentials for a URL, with its end; b"" without any.

        The user in a mirror's URL is for all paths of its host, as in curl; credential files may have more
        specific ones.
        """
        if self._users:
            header = self._users.get(parse_url(url.partition("?")[0]).origin, b"")
            if header:
                return header
        return b"" if self._credentials is None else self._credentials(url)

    def address(self, url: str, asked: str | None = None) -> Address:
        """
        Return the address of a URL, with the user in the URL or the credentials of the host.

        Args:
            asked: the URL for which to look up credentials, if it differs.

        Raises:
            UsageError: as ``parse_url`` and ``through``.
        """
        header = b""
        if "@" in url:
            from pipegrid.mirror.credentials import user_of  # few runs need it

            url, header = user_of(url)
            origin = parse_url(url).origin
            same = self._users.get(origin, header) == header
            # If there are several users, none is for all paths.
            self._users[origin] = header if same else b""
        header = header or self.header_for(asked or url)
        address = through(parse_url(url), self._environment)
        return address.replaced(access=self, headers=address.headers + header)


class Address(Value):
    """
    The address of a mirror.

    Attributes:
        prefix: of every request's target, ending in ``/``.
        proxy: which is asked instead.
        headers: further lines of every request, each with its end. Not in ``repr``.
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
        """Scheme, host and port, in the simplest form: equal if the same connections can be used."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def base_url(self) -> str:
        """The part of the URL before each path."""
        path = self.prefix.decode("ascii")
        if path.startswith("http://"):
            path = path[path.index("/", len("http://")) :]
        return self.origin + path

    @property
    def place(self) -> tuple[bytes, int]:
        """
        Host and port for the lookup; as bytes, since text would be checked for IDNA, which loads tables.
        """
        return self.host.encode("ascii"), self.port


def parse_url(url: str) -> Address:
    """
    Parse a mirror's URL.

    Raises:
        UsageError: it is neither http nor https, has no host, or has a user, a query, or a fragment.
    """
    plain = plain_url(url)
    if plain is not None:
        scheme, host, known_port, path = plain
        netloc = url.split("/", 3)[2].encode("ascii")
        prefix = f"/{path}".rstrip("/") + "/"
        return Address(url, scheme, host, known_port, prefix.encode("ascii"), netloc)
    return _look_closely(url)


def _look_closely(url: str) -> Address:
    # Simple URLs need no parser, which takes a millisecond and a half to load.
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
    Return the address through the environment's proxy, if there is one for it.

    For http the proxy gets the whole URL; for https it makes a tunnel, and sees nothing else. A SOCKS5 proxy
    makes a tunnel in both cases.

    Raises:
        UsageError: the environment names something other than a proxy; or only Tor or I2P know the host, and
            it is not reached through a SOCKS5 proxy.
    """
    has_proxy = any(name.lower().endswith("_proxy") for name in environment)
    if not has_proxy and not is_overlay_host(address.host):
        return address
    from pipegrid.http11.proxy_settings import check_resolvable, proxy_for  # few runs need it

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

    A plus sign is escaped, as in apt and dnf: stores such as S3 read an unescaped one as a space.
    """
    if _PLAIN_PATH.fullmatch(path) is None:
        from urllib.parse import quote

        path = quote(path, safe=_SAFE)
    if "+" in path:
        path = path.replace("+", "%2B")
    return address.prefix + path.encode("ascii")


class RedirectRefused(Exception):
    """A redirect that is not followed; the text is a clause, without passwords and queries."""


class FileRoute(Value):
    """
    Where one file is requested.

    Attributes:
        address: of the host.
        target: in the request line.
        url: the whole URL.
        hops: how many redirects led here.
        rule: the learnt prefix that led here without a request; None if a redirect did, or if this is the
            mirror's own URL.
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
    """Return where a mirror itself has a path."""
    target = target_of(address, path)
    above = len(address.prefix)
    return FileRoute(address, target, address.base_url + target[above:].decode("ascii"))


def small_request(address: Address, target: bytes) -> bytes:
    """Return a request for a small file that a run begins with; caches must not answer it."""
    return b"GET %s%s" % (target, head_tail(address, b"Cache-Control: max-age=0"))


def head_tail(address: Address, field: bytes = b"Accept-Encoding: identity") -> bytes:
    """Return the part of a request after the target, with that field, and the empty line at its end."""
    agent = __version__.encode("ascii")
    return b" HTTP/1.1\r\nHost: %s\r\nUser-Agent: pipegrid/%s\r\n%s\r\n%s\r\n" % (
        address.netloc,
        agent,
        field,
        address.headers,
    )

"""Mirror URL, request and response heads, open sockets."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import Value, quoted
from pipegrid.mirror.preconnect_mirrors import EarlySockets, begin, place_of, plain_url
from pipegrid.version import __version__

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from _socket import socket
    from typing import Any, Protocol

    from pipegrid.http11.proxy_settings import Proxy
    from pipegrid.mirror.credentials import TlsFiles


# Where a mirror is, how it is asked, and what stands in a request for one of its files. Pure.


_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._~+:@!$&'()*,;=-]+")
_SAFE = "/~+:@!$&'()*,;="


if TYPE_CHECKING:

    class LearntRedirects(Protocol):
        """What was learnt from the redirects of a run; see ``redirects.RedirectTable``."""

        def follow(self, route: FileRoute, locations: Sequence[bytes]) -> FileRoute:
            """Return where a redirect leads to. Raises: RedirectRefused: it is not followed."""

        def route_of(self, url: str) -> FileRoute | None:
            """Return where a URL is expected; None: nothing was learnt."""

        def served(self, url: str) -> None:
            """A host has served this itself."""

        def forget(self, rule: str) -> None:
            """A rule was wrong; neither it nor one that says more is made again."""

        def forget_host(self, address: Address) -> None:
            """A host gives nothing: what was learnt leads there no more."""


_PORTS = {"http": 80, "https": 443}


class HostAccess:
    """
    How hosts are asked, those of the mirrors and those that they redirect to.

    Args:
        environment: names proxies.
        credentials: returns the header line for a URL, or b""; None: nobody has any.
        tls: authorities, and the certificate that is shown; None: the system's, and none.

    Attributes:
        redirects: what was learnt from redirects; None: there was none.
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
        Return the header line with what is known for a URL, with its end; b"": nothing is.

        The user of a mirror's URL is for all paths of its host, as with curl; entries of files may say more.
        """
        if self._users:
            header = self._users.get(parse_url(url.partition("?")[0]).origin, b"")
            if header:
                return header
        return b"" if self._credentials is None else self._credentials(url)

    def address(self, url: str, asked: str | None = None) -> Address:
        """
        Return where a URL is, and how it is asked, with the user of the URL or what is known of the host.

        Args:
            asked: the URL for which credentials are looked up, if it is another than this one.

        Raises:
            UsageError: as ``parse_url`` and ``through``.
        """
        header = b""
        if "@" in url:
            from pipegrid.mirror.credentials import user_of  # which few need

            url, header = user_of(url)
            origin = parse_url(url).origin
            same = self._users.get(origin, header) == header
            self._users[origin] = (
                header if same else b""
            )  # with several users none is for all paths
        header = header or self.header_for(asked or url)
        address = through(parse_url(url), self._environment)
        return address.replaced(access=self, headers=address.headers + header)


class Address(Value):
    """
    Where a mirror is.

    Attributes:
        prefix: of every request's target, ending in ``/``.
        proxy: who is asked in its place.
        headers: further lines of every request, each with its end. Not shown.
        access: what all hosts of a run have in common.
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
        """Scheme, host and port, in the simplest form: equal if the same connections serve."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def base_url(self) -> str:
        """What stands before each path."""
        path = self.prefix.decode("ascii")
        if path.startswith("http://"):
            path = path[path.index("/", len("http://")) :]
        return self.origin + path

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
    if "@" in parts.netloc:
        raise UsageError("the URL of a mirror has no user here; give http://HOST/PATH")
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
    Return how a mirror is asked: by the proxy of the environment, if there is one for it.

    Of a mirror over http a proxy is asked for the whole URL; to one over https it makes a way, and sees
    nothing.

    Raises:
        UsageError: the environment names something else than a proxy.
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return address
    from pipegrid.http11.proxy_settings import proxy_for  # which few need

    proxy = proxy_for(address.scheme, address.host, address.port, environment)
    if proxy is None or address.scheme == "https":
        return address.replaced(proxy=proxy)
    prefix = b"http://%s%s" % (address.netloc, address.prefix)
    return address.replaced(proxy=proxy, prefix=prefix, headers=proxy.authorization)


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


class RedirectRefused(Exception):
    """A redirect that is not followed; the text is a clause, without passwords and queries."""


class FileRoute(Value):
    """
    Where one file is asked for.

    Attributes:
        address: of the host.
        target: what stands in the request line.
        url: the whole of it.
        hops: how many redirects led here.
        rule: the prefix that was learnt and led here without a request; None: the host said so, or this is
            the mirror's own URL.
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
    """Return a request for a small file that everything begins with, and that no cache is to answer."""
    return (
        b"GET %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: pipegrid/%s\r\nCache-Control: max-age=0\r\n%s\r\n"
        % (
            target,
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


# The heads of answers, as far as a sprint understands them: what goes well. Pure.

MAX_HEAD_BYTES = 64 << 10
LF_ALONE = "it ends lines with LF alone"


class SmallAnswers(dict[str, bytes]):
    """
    Files by path, as far as a mirror gives them.

    Attributes:
        refused: by path, what it answers in place of the others, in words.
        redirected: by path, where it says that others are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}
        self.redirected: dict[str, tuple[bytes, ...]] = {}


def may_be(path: str, data: bytes) -> bool:
    """Return whether a file looks like what its name says: pipelined answers may have been mixed up."""
    begins = data.lstrip()[:30]
    if path.endswith("InRelease"):
        return begins.startswith(b"-----BEGIN PGP SIGNED")
    if path.endswith((".gpg", ".asc")):
        return begins.startswith(b"-----BEGIN PGP SIGNATURE") or data[:1] >= b"\x80"
    return not begins.startswith(b"-----BEGIN PGP")


class UnsupportedResponse(Exception):
    """The server does something that a sprint does not understand; the text is a clause."""


BUSY = frozenset({429, 503})
"""Statuses that say "not so much": of the mirror, and of no file in particular."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses that say where else to ask."""

TRANSIENT = BUSY | {408, 425, 500, 502, 504}
"""Statuses that say "not now"; the others say "not this"."""


def judge(status: int) -> tuple[bool, str]:
    """Return whether a status other than 200 is one of the moment, and what it means, as a clause."""
    if 300 <= status < 400:
        return False, f"it answers {status}, which leads nowhere"
    return status in TRANSIENT, f"it answers {status}"


class Head:
    """
    What a sprint wants to know of an answer.

    Attributes:
        length: of the body, in bytes.
        closes: it is the last on its connection.
        locations: the values of its ``Location`` fields, if it redirects.
    """

    __slots__ = ("closes", "length", "locations", "status")

    def __init__(
        self, status: int, length: int, closes: bool, locations: tuple[bytes, ...] = ()
    ) -> None:
        self.status = status
        self.length = length
        self.closes = closes
        self.locations = locations


USUAL_HEAD = re.compile(
    rb"HTTP/1\.1 200 OK\r\nServer: [^\r\n:]*\r\nDate: [^\r\n]*\r\n(?:Content-Type: [^\r\n]*\r\n)?"
    rb"Content-Length: ([0-9]{1,16})\r\nLast-Modified: [^\r\n]*\r\nConnection: keep-alive\r\n"
    rb"ETag: [^\r\n]*\r\n(?:Accept-Ranges: bytes\r\n)?\r\n"
)
"""As nginx says it of nearly every file: one look instead of a dozen."""


def parse_head(head: bytes) -> Head:
    """
    Take a head apart, that comes without the empty line at its end.

    Raises:
        Odd: it is none, or says what a sprint does not understand.
    """
    told_head, head = head, head.lower()
    if not head.startswith(b"http/1.1 ") or not head[9:12].isdigit():
        raise UnsupportedResponse("it does not speak HTTP/1.1")
    status = int(head[9:12])
    if status < 200 or status in (204, 304) or b"\r\ntransfer-encoding:" in head:
        raise UnsupportedResponse("its answers have no length")
    told, again = _field(head, b"\r\ncontent-length:")
    if again or not told.isdigit() or len(told) > 16:
        raise UnsupportedResponse("its answers have no length")
    options, again = _field(head, b"\r\nconnection:")
    locations = _locations(told_head, head) if status in REDIRECTS else ()
    return Head(status, int(told), again or b"close" in options, locations)


def _locations(head: bytes, lowered: bytes) -> tuple[bytes, ...]:
    """
    Return the values of the ``Location`` fields of a head.

    Raises:
        UnsupportedResponse: one is folded over several lines.
    """
    found: list[bytes] = []
    name = b"\r\nlocation:"
    start = lowered.find(name)
    while start >= 0 and len(found) < 2:
        start += len(name)
        end = head.find(b"\r\n", start)
        end = len(head) if end < 0 else end
        if head[end + 2 : end + 3] in (b" ", b"\t"):
            raise UnsupportedResponse("it folds lines")
        found.append(head[start:end].strip())
        start = lowered.find(name, end)
    return tuple(found)


def _field(head: bytes, name: bytes) -> tuple[bytes, bool]:
    """Return the first field of a name (with the end of the line before it); is there another?"""
    start = head.find(name)
    if start < 0:
        return b"", False
    end = head.find(b"\r\n", start + 2)
    value = head[start + len(name) : end if end >= 0 else len(head)]
    return value.strip(), end >= 0 and head.find(name, end) >= 0


# Beginning to connect, which nobody waits for: a mirror is a round trip away, or ten imports.
#
# The first connections to each mirror are begun before the modules are loaded that will use them, and for
# most command lines by ``headstart`` already. What cannot be begun here is begun again by whoever needs
# it, who knows what to make of the error.

# as ``typing`` has it, which is not to be waited for


def can_sprint(addresses: Sequence[Address]) -> bool:
    """Return whether there is a point in trying: no proxies, and a system with what it takes."""
    return (
        hasattr(select, "epoll")
        and hasattr(os, "eventfd")
        and bool(addresses)
        and all(address.proxy is None for address in addresses)
    )


def securing(address: Address) -> Callable[[Any], Any]:
    """Return what makes TLS of a socket that is connected, and has not shaken hands yet."""
    import ssl  # which few need here

    if address.access.tls is not None:
        context = address.access.tls.context(address.host, address.port)
    else:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])

    def secure(sock: Any) -> Any:
        return context.wrap_socket(
            sock, server_hostname=address.host, do_handshake_on_connect=False
        )

    return secure


# Memory that sockets are read into, and from which answers are cut out.

PAGE_BYTES = 256 << 10
"""Received at a time. What is hashed, and written, right after that is still in the processor's cache."""


class Page:
    """
    Memory that is read into.

    Attributes:
        users: jobs of the thread that still need what is in it, and one more while it is being parsed.
    """

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = bytearray(PAGE_BYTES)
        self.view = memoryview(self.data)
        self.users = 0


class SocketCache:
    """
    Connections to mirrors, begun already, or left by who has no use for them any more; to be closed.

    Args:
        addresses: each asked directly, without a proxy.
        each: how many to each of them.
        head_start: has begun some of these, and gives them here.
    """

    def __init__(
        self, addresses: Sequence[Address], each: int = 1, head_start: EarlySockets | None = None
    ) -> None:
        self._begun: dict[str, list[tuple[socket, int]]] = {}
        for address in addresses:
            sockets = head_start.take(address.url) if head_start is not None else []
            begun = self._begun.setdefault(address.origin, [])
            begun += [(sock, 0) for sock in sockets]
            with suppress(OSError):
                place = place_of(*address.place) if len(begun) < each else None
                while place is not None and len(begun) < each:
                    begun.append((begin(place), 0))

    def take(self, address: Address) -> tuple[socket, int] | None:
        """Return one to a mirror, and how many files were asked for on it, if there is one more."""
        begun = self._begun.get(address.origin)
        while begun:
            sock, count = begun.pop(0)
            if not _has_something(sock):
                return sock, count
            sock.close()
        return None

    def give(self, address: Address, sock: socket, count: int) -> None:
        """Leave one for others, on which so many files were asked for, and came."""
        self._begun.setdefault(address.origin, []).append((sock, count))

    def close(self) -> None:
        """Let go of what nobody took."""
        for begun in self._begun.values():
            while begun:
                begun.pop()[0].close()


def _has_something(sock: socket) -> bool:
    """Whether a server said something unasked: nearly always that it has ended the connection."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))

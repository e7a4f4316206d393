"""
Lists of mirrors (metalinks, and the mirror lists of dnf and apt), and the choice of mirrors from a list.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from hashlib import new as new_hash
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import DIGEST_BYTES, BadEntry, MirrorError, quoted
from pipegrid.mirror.mirror_urls import parse_url
from pipegrid.mirror.preconnect_mirrors import is_overlay_host
from pipegrid.mirror.redirects import MAX_REDIRECTS, shown_url
from pipegrid.mirror.rpm_metadata import XmlParser
from pipegrid.version import __version__

if TYPE_CHECKING:
    from urllib.request import BaseHandler

    from pipegrid.mirror.credentials import TlsFiles

# A list is small, and is needed before everything else: the standard library fetches it, through the
# environment's proxies. This module checks the list; the chosen mirrors are used like those of ``--from``.

MAX_LIST_BYTES = 4 << 20
MAX_LINES = 10_000
MAX_SELECTED = 5
"""Maximum number of mirrors of one list that a run uses."""

MAX_VERSIONS = 64
"""Maximum number of versions of ``repomd.xml`` that are read from a metalink."""

TIMEOUT_S = 20.0
MOST_S = 60.0

_END = "repodata/repomd.xml"
_SCHEMES = ("https://", "http://")
_LOWEST = 1 << 30
_PRIORITY = re.compile(r"priority:([0-9]{1,8})")


class Metalink(NamedTuple):
    """
    A metalink's data about one repository.

    Attributes:
        urls: of the selected mirrors, the best first; each is the parent of ``repodata``.
        versions: of ``repomd.xml``, the newest first; each is a mapping of algorithms to hashes (lower-case
            hex).
    """

    urls: list[str]
    versions: list[dict[str, str]]

    def names(self, data: bytes) -> bool:
        """Return whether all hashes of one of the versions match ``data``."""
        return any(
            all(new_hash(name, data).hexdigest() == digest for name, digest in version.items())
            for version in self.versions
        )


def read_metalink(data: bytes, name: str) -> Metalink:
    """
    Parse a metalink (version 3, as MirrorManager writes it).

    Raises:
        BadEntry: the data is not a metalink, or has no usable mirror or hash.
    """
    reader = _MetalinkReader()
    parser = XmlParser(reader, name)
    parser.feed(data)
    parser.end()
    versions = [each for each in reader.versions if each]
    if not versions:
        raise BadEntry(
            f"{name} has no SHA-256 or SHA-512 of repomd.xml; use --mirrorlist or --from"
        )
    return Metalink(_selected(reader.ranked, name), versions)


class _MetalinkReader:
    def __init__(self) -> None:
        self.versions: list[dict[str, str]] = []
        self.ranked: list[tuple[int, str]] = []
        self._is_wanted = False
        self._attributes: Mapping[str, str] = {}

    def opened(self, depth: int, name: str, attributes: Mapping[str, str]) -> bool:
        local = name.rpartition(":")[2]
        if local == "file":
            self._is_wanted = attributes.get("name") == "repomd.xml"
            self._begin()
        elif local == "alternate" and self._is_wanted:
            self._begin()
        self._attributes = attributes
        return self._is_wanted and local in ("hash", "url")

    def _begin(self) -> None:
        if self._is_wanted and len(self.versions) < MAX_VERSIONS:
            self.versions.append({})

    def closed(self, depth: int, name: str, text: str) -> None:
        local = name.rpartition(":")[2]
        if local == "file":
            self._is_wanted = False
        if not self._is_wanted:
            return
        if local == "hash":
            algorithm = self._attributes.get("type", "").lower().replace("-", "")
            digest = text.strip().lower()
            if len(digest) == 2 * DIGEST_BYTES.get(algorithm, -1):
                self.versions[-1][algorithm] = digest
        elif local == "url" and len(self.ranked) < MAX_LINES:
            url = text.strip()
            if url.endswith(_END):
                preference = self._attributes.get("preference", "")
                known = preference.isascii() and preference.isdigit() and len(preference) < 6
                self.ranked.append((-int(preference) if known else 0, url.removesuffix(_END)))


def read_mirror_list(data: bytes, name: str) -> list[str]:
    """
    Return the selected mirrors of a list, the best first.

    A line has a URL, optionally followed by a tab and apt's fields, of which only ``priority:N`` is used:
    lower numbers are better. Empty lines and lines that begin with ``#`` are skipped.

    Raises:
        BadEntry: the list has no usable mirror.
    """
    lines = data.decode("utf-8", "replace").splitlines()
    if len(lines) > MAX_LINES:
        raise BadEntry(f"{name} has more than {MAX_LINES} lines")
    ranked = []
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        rank = _LOWEST
        for word in words[1:]:
            match = _PRIORITY.fullmatch(word)
            if match is not None:
                rank = int(match[1])
        ranked.append((rank, words[0]))
    return _selected(ranked, name)


def _selected(ranked: list[tuple[int, str]], name: str) -> list[str]:
    """Return the best usable mirrors, each once: by rank; of equal rank, https before http."""
    ranked = sorted(ranked, key=lambda each: (each[0], not each[1].lower().startswith("https:")))
    found: dict[str, None] = {}
    for _, url in ranked:
        if url.lower().startswith(_SCHEMES) and len(found) < MAX_SELECTED:
            try:
                parse_url(url)
            except UsageError:
                continue
            found[url.rstrip("/") + "/"] = None
    if not found:
        raise BadEntry(f"{name} names no mirror over http or https")
    return list(found)


def expanded(url: str, tls: TlsFiles | None = None) -> list[str]:
    """
    Return the mirrors for a URL of ``--from``: the URL itself, or the mirrors of a list for apt's schemes
    such as ``mirror+file:``.

    Raises:
        MirrorError: the list cannot be read. BadEntry: the list has no usable mirror.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "mirror+file":
        path = Path("/" + rest.lstrip("/"))
        try:
            with path.open("rb") as file:
                data = file.read(MAX_LIST_BYTES + 1)
        except OSError as error:
            raise MirrorError(f"{path}: {error.strerror}; --from names it as a list") from error
        return read_mirror_list(_bounded(data, str(path)), str(path))
    if scheme in ("mirror", "mirror+http", "mirror+https"):
        where = (scheme.partition("+")[2] or "http") + ":" + rest
        return read_mirror_list(fetched_list(where, tls), shown_url(where))
    return [url]


def fetched_list(url: str, tls: TlsFiles | None = None) -> bytes:
    """
    Fetch a metalink or a list of mirrors.

    Args:
        tls: the certificate authorities; and the client's certificate, which only the host of the URL gets.

    Raises:
        UsageError: the URL is not an http or https URL. MirrorError: the list cannot be fetched.
    """
    import urllib.request

    name = shown_url(url)
    if not url.lower().startswith(_SCHEMES):
        raise UsageError(f"{name} is not the URL of a list of mirrors; give http://… or https://…")

    _check_proxies(url, name)
    if tls is not None:
        tls.show_to(url)
    opener = urllib.request.build_opener(*_handlers(name, tls))
    asked = urllib.request.Request(url, headers={"User-Agent": f"pipegrid/{__version__}"})
    until_s = time.monotonic() + MOST_S
    data = b""
    try:
        with opener.open(asked, timeout=TIMEOUT_S) as answer:
            while piece := answer.read1(64 << 10):
                data += piece
                if time.monotonic() > until_s:
                    raise MirrorError(f"{name}: it has not come within {MOST_S:.0f} s")
                if len(data) > MAX_LIST_BYTES:
                    break
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        code = getattr(error, "code", None)
        raise MirrorError(
            f"{name}: the list of mirrors cannot be fetched ({code or reason})"
        ) from error
    except Exception as error:  # http.client's errors if the server speaks another protocol
        if isinstance(error, (MirrorError, UsageError)):
            raise
        raise MirrorError(
            f"{name}: its server does not speak HTTP ({quoted(str(error))})"
        ) from error
    return _bounded(data, name)


def _check_proxies(url: str, name: str) -> None:
    """
    Check that the standard library can fetch a list as the environment demands.

    Raises:
        UsageError: the environment names a SOCKS proxy, which the standard library does not support; or only
            Tor or I2P know the host.
    """
    from urllib.parse import urlsplit

    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        raise UsageError(f"{name} is not the URL of a list of mirrors; correct it") from None
    if is_overlay_host(host):
        raise UsageError(f"{name}: only Tor or I2P know its host; give mirrors with --from")
    for variable, value in os.environ.items():
        if variable.lower().endswith("_proxy") and value.lower().startswith("socks"):
            raise UsageError(
                f"{name} is a list of mirrors, which is not fetched through {variable}, a SOCKS proxy; "
                "give mirrors with --from"
            )


def _handlers(name: str, tls: TlsFiles | None) -> list[type[BaseHandler]]:
    """Return the ``urllib`` handlers for redirects of a list, for its connections, and for proxies."""
    import urllib.request
    from http.client import HTTPResponse, HTTPSConnection
    from urllib.parse import urlsplit

    from pipegrid.http11.proxy_settings import proxy_for

    class Redirects(urllib.request.HTTPRedirectHandler):
        max_redirections = max_repeats = MAX_REDIRECTS

        def redirect_request(self, *arguments: object) -> urllib.request.Request | None:
            new, old = str(arguments[-1]), arguments[0]
            assert isinstance(old, urllib.request.Request)
            if old.full_url.startswith("https:") and not new.startswith("https:"):
                raise MirrorError(f"{name}: it redirects from https, which is not followed")
            _check_proxies(new, name)
            return super().redirect_request(*arguments)  # type: ignore[arg-type]

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> HTTPResponse:
            parts = urlsplit(request.full_url)
            context = tls and tls.context(parts.hostname or "", parts.port or 443)
            return self.do_open(HTTPSConnection, request, context=context)

    class Proxies(urllib.request.ProxyHandler):  # replaces urllib's, which does not use ALL_PROXY
        def __init__(self) -> None:
            super().__init__({})

        def http_open(self, request: urllib.request.Request) -> Any:
            parts = urlsplit(request.full_url)
            if request.has_proxy() or parts.hostname is None:
                return None
            port = parts.port or (443 if parts.scheme == "https" else 80)
            proxy = proxy_for(parts.scheme, parts.hostname, port, os.environ)
            if proxy is None:
                return None
            if proxy.authorization:
                header, _, value = proxy.authorization.decode("latin-1").partition(":")
                request.add_unredirected_header(header.capitalize(), value.strip())
            request.set_proxy(urlsplit(proxy.url).netloc, proxy.scheme)
            if parts.scheme == "https" or proxy.scheme == "http":
                return None  # urllib's own handler connects to the proxy
            return self.parent.open(request, timeout=request.timeout)

        https_open = http_open

    return [Redirects, Https, Proxies]


def _bounded(data: bytes, name: str) -> bytes:
    if len(data) > MAX_LIST_BYTES:
        raise MirrorError(f"{name} has more than {MAX_LIST_BYTES} bytes; no list of mirrors has")
    return data

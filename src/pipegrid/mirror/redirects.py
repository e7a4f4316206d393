"""Redirects: which redirects are followed, and which prefixes of URLs are learnt from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from pipegrid.errors import UsageError
from pipegrid.mirror.archive_file import quoted
from pipegrid.mirror.mirror_urls import Address, FileRoute, HostAccess, RedirectRefused

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from pipegrid.mirror.mirror_urls import LearntRedirects

# A mirror may redirect to another host. The other host's responses are checked by the same hash, so a
# redirect decides only which host is asked, never what is accepted. At most ``MAX_REDIRECTS`` redirects are
# followed for each file, and none from https to http.
#
# **Prefixes.** If a URL and the URL that it redirects to end in the same path, the parts before that path
# make a rule: files below the first prefix are expected below the second, and requested there directly. Of
# the possible prefixes, a rule uses the most general one below which the first host has served no file
# without a redirect. If the second host refuses a file, or has a wrong one, the rule is dropped, no rule is
# made for this prefix again, and the first host is asked as if there had been no rule.

MAX_REDIRECTS = 5
"""How many redirects are followed for each file."""

MAX_LOCATION_BYTES = 4096
MAX_RULES = 1024
MAX_UNLEARNT = 4096
"""How many prefixes are remembered as not redirected as a whole; after that, no more rules are learnt."""

MAX_HOSTS = 512
"""How many hosts all mirrors of a run together may redirect to."""

_SAFE_IN_URL = "%/:?#[]@!$&'()*+,;=~-._"
_PORTS = {"http": 80, "https": 443}


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    return (
        re.compile(r"(https?)://([^/?]*)(/[^?]*)?(\?.*)?", re.IGNORECASE),
        re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{0,5}))?"),
        re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}:"),
    )


def located(url: str, locations: Sequence[bytes]) -> str:
    """
    Return the URL that a redirect leads to, in its simplest form, without a fragment.

    Args:
        url: the requested URL.
        locations: the values of the response's ``Location`` fields.

    Raises:
        RedirectRefused: there is no URL, more than one, or one that is not followed.
    """
    if len(set(locations)) > 1:
        raise RedirectRefused("it redirects to several URLs at once")
    if not locations or not locations[0].strip():
        raise RedirectRefused("it redirects without saying where to")
    location = locations[0].strip()
    if len(location) > MAX_LOCATION_BYTES:
        raise RedirectRefused(f"it redirects to a URL of {len(location)} bytes")
    if any(byte < 32 or byte in (0x5C, 0x7F) for byte in location):
        raise RedirectRefused("it redirects to a URL with characters that no URL has")
    from urllib.parse import quote, urljoin

    absolute, authority, scheme_of = _patterns()
    text = quote(location, safe=_SAFE_IN_URL).partition("#")[0]
    match = absolute.fullmatch(text)
    if match is None:
        if scheme_of.match(text):
            raise RedirectRefused(
                f"it redirects to {shown_url(text)}, which is neither http nor https"
            )
        try:
            match = absolute.fullmatch(urljoin(url, text))
        except ValueError:
            match = None
    if match is None or (where := authority.fullmatch(match[2])) is None:
        if match is not None and "@" in match[2]:
            raise RedirectRefused("it redirects to a URL with a user name, which is not followed")
        raise RedirectRefused("it redirects to something that is not a URL")
    scheme, host, port = match[1].lower(), where[1].lower(), int(where[2] or 0)
    if where[2] and not 0 < port < 65536:
        raise RedirectRefused("it redirects to a port that does not exist")
    if scheme == "http" and url.startswith("https:"):
        raise RedirectRefused("it redirects from https to http, which is not followed")
    suffix = f":{port}" if port and port != _PORTS[scheme] else ""
    return f"{scheme}://{host}{suffix}{match[3] or '/'}{match[4] or ''}"


def shown_url(url: str) -> str:
    """Return a URL for a message: without user, password and query, quoted and shortened to a limit."""
    plain = url.partition("?")[0]
    scheme, mark, rest = plain.partition("://")
    authority, slash, path = rest.partition("/")
    if mark:
        plain = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    return quoted(plain)


class RedirectTable:
    """
    What one run has learnt from redirects.

    Args:
        access: makes addresses of URLs.
    """

    def __init__(self, access: HostAccess) -> None:
        self._access = access
        self._rules: dict[str, str] = {}
        self._unlearnt: set[str] = set()
        self._addresses: dict[tuple[str, bytes], Address] = {}

    def follow(self, route: FileRoute, locations: Sequence[bytes]) -> FileRoute:
        """
        Return where a redirect leads, and learn from it.

        Raises:
            RedirectRefused: the redirect is not followed.
        """
        url = located(route.url, locations)
        if route.hops >= MAX_REDIRECTS:
            raise RedirectRefused(f"it redirects more than {MAX_REDIRECTS} times")
        found = self._route(url, route.hops + 1)
        self._learn(route.url, url)
        return found

    def route_of(self, url: str) -> FileRoute | None:
        """Return where the rules expect a URL to be served; None if no rule applies."""
        first = None
        at = url
        for _ in range(MAX_REDIRECTS):
            rule = self._rule_of(at)
            if rule is None:
                break
            first = first or rule
            at = self._rules[rule] + at[len(rule) :]
        else:
            return None  # the rules lead in a circle
        return None if first is None else self._route(at, 0, first)

    def served(self, url: str) -> None:
        """
        Record that a host has served a URL without a redirect, so none of its prefixes is redirected as a
        whole.
        """
        for prefix in _prefixes(url):
            if prefix in self._unlearnt or len(self._unlearnt) >= MAX_UNLEARNT:
                break  # shorter prefixes have been recorded, too
            self._unlearnt.add(prefix)
            self._rules.pop(prefix, None)

    def forget(self, rule: str) -> None:
        """Drop a rule that was wrong; neither this rule nor a more general one is made again."""
        self._rules.pop(rule, None)
        self.served(rule)

    def forget_host(self, address: Address) -> None:
        """Drop the rules that lead to a host that was given up."""
        for rule, target in list(self._rules.items()):
            if _origin_of(target) == address.origin:
                self.forget(rule)

    def _learn(self, url: str, target: str) -> None:
        if "?" in url or "?" in target or len(self._unlearnt) >= MAX_UNLEARNT:
            return
        if len(self._rules) >= MAX_RULES or self._rule_of(url) is not None:
            return
        learnt = None
        for prefix in _prefixes(url):  # the longest first
            rest = url[len(prefix) :]
            if not target.endswith("/" + rest) or prefix in self._unlearnt:
                break
            above = target[: len(target) - len(rest)]
            if above.count("/") < 3:  # the target's prefix would end within the scheme or the host
                break
            if not above.startswith(prefix):  # otherwise the rule would apply to its own result
                learnt = prefix, above
        if learnt is not None:
            self._rules[learnt[0]] = learnt[1]

    def _rule_of(self, url: str) -> str | None:
        return next((each for each in _prefixes(url) if each in self._rules), None)

    def _route(self, url: str, hops: int, rule: str | None = None) -> FileRoute:
        origin = _origin_of(url)
        known = origin, self._access.header_for(url)
        address = self._addresses.get(known)
        if address is None:
            if len(self._addresses) >= MAX_HOSTS:
                raise RedirectRefused("it redirects to too many hosts")
            try:
                address = self._access.address(origin + "/", url)
            except UsageError as error:
                raise RedirectRefused(f"it redirects to a URL that is refused: {error}") from None
            self._addresses[known] = address
        target = address.prefix + url[len(origin) + 1 :].encode("ascii")
        return FileRoute(address, target, url, hops, rule)


def table_of(access: HostAccess) -> LearntRedirects:
    """Return what a run has learnt from redirects; the table is made on first use."""
    if access.redirects is None:
        access.redirects = RedirectTable(access)
    return access.redirects


def _origin_of(url: str) -> str:
    return url[: url.index("/", url.index("//") + 2)]


def _prefixes(url: str) -> Iterator[str]:
    """Yield the prefixes of a URL: its directory, the parent of that, and so on up to the host."""
    first = url.index("/", url.index("//") + 2)
    at = url.rfind("/")
    while at >= first:
        yield url[: at + 1]
        at = url.rfind("/", 0, at)

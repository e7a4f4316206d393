"""
The head of a request, and the checks that need only the head: path, method, authorisation, secrets, and
length of the body.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from enum import Enum

import attrs

from pipegrid.server.gbs import responses
from pipegrid.server.gbs.responses import Answer
from pipegrid.storage.uploads.eviction import NOBODY, Client
from pipegrid.wire import (
    gbs_bundles,
    gbs_cbor_bodies,
    gbs_mutable,
    gbs_paths_headers,
    gbs_surveys_releases,
)
from pipegrid.wire.gbs_paths_headers import GbsTarget, Resource
from pipegrid.wire.storage_messages import LeaseSecrets

WANTED_HEADERS = frozenset(
    {b"authorization", b"accept", b"content-type", b"content-range", b"range", b"expect"}
)
SECRET_HEADER = b"x-tahoe-authorization"

_ORIGIN = re.compile(
    rb"https?://(?:\[[0-9a-fv:.]+\]|[^\[\]/?#@:]+)(?::[0-9]*)?(?=[/?]|\Z)", re.IGNORECASE
)
"""The part before the path in an absolute URL, which has a host and no user name."""

_HOST = re.compile(
    rb"(?:\[[\w:.%~!$&'()*+,;=-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9a-f]{2})*)(?::[0-9]*)?",
    re.IGNORECASE,
)
"""A Host header's value, possibly empty or only a port (RFC 9110, 7.2; RFC 3986, 3.2)."""


@attrs.define(eq=False, repr=False)
class Request:
    """
    The head of one request.

    Attributes:
        method, url: the method and URL as they were sent.
        headers: the first header of each kind in WANTED_HEADERS, by lower-case name.
        secrets: the values of all secret headers.
        hosts: the values of all Host headers.
        content_length: the length of the body; None if it is chunked.
        keep_alive: whether the client wants to keep the connection.
        http10: whether the request is HTTP/1.0; if so, the answer must confirm that the connection is kept.
        target: the object that the URL names, or None.
        client: the sender.
    """

    method: bytes = b""
    url: bytes = b""
    headers: dict[bytes, bytes] = attrs.field(factory=dict)
    secrets: list[bytes] = attrs.field(factory=list)
    hosts: list[bytes] = attrs.field(factory=list)
    content_length: int | None = 0
    keep_alive: bool = True
    http10: bool = False
    target: GbsTarget | None = None
    client: Client = NOBODY

    def locate(self) -> None:
        """
        Set ``target`` from the URL. The query is ignored.

        All servers must accept the absolute form of URL, which is usually sent to proxies (RFC 9112, 3.2.2).
        The host in such a URL replaces the Host header's; this server accepts any host.
        """
        url = self.url
        if not url.startswith(b"/"):
            origin = _ORIGIN.match(url)
            url = url[origin.end() :] if origin else b""
        path = url.partition(b"?")[0]
        try:
            self.target = gbs_paths_headers.parse_path(path.decode("ascii"))
        except UnicodeDecodeError:
            self.target = None

    @property
    def names_its_host(self) -> bool:
        """
        Whether the request has exactly one valid Host header, or is HTTP/1.0 and has none (RFC 9112, 3.2).
        """
        hosts = self.hosts
        if len(hosts) != 1:
            return not hosts and self.http10
        return _HOST.fullmatch(hosts[0].strip()) is not None

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for 100 (Continue) before it sends the body."""
        expected = self.headers.get(b"expect", b"").lower() == b"100-continue"
        return expected and not self.http10


class Operation(Enum):
    """The operation of a request."""

    VERSION = "version"
    ALLOCATE = "allocate"
    WRITE = "write"
    BUNDLE = "bundle"
    SURVEY = "survey"
    READ_BUNDLE = "read bundle"
    RELEASE_LEASES = "release leases"
    ABORT = "abort"
    LIST = "list"
    READ = "read"
    CORRUPT = "corrupt"
    LEASE = "lease"
    READ_TEST_WRITE = "read-test-write"
    SLOT_LIST = "list mutable"
    SLOT_READ = "read mutable"
    SLOT_CORRUPT = "corrupt mutable"


@attrs.frozen
class Rule:
    """
    The requirements of an operation.

    Attributes:
        operation: the operation.
        secrets: the kinds of secrets that are required; no other kinds are allowed.
        body_limit_bytes: the longest body that is a message; 0: the body is ignored; None: the body is share
            data.
        answers_cbor: whether an ``Accept`` header must allow CBOR.
    """

    operation: Operation
    secrets: frozenset[str] = gbs_paths_headers.NO_SECRETS
    body_limit_bytes: int | None = 0
    answers_cbor: bool = False


def _reads(operation: Operation, answers_cbor: bool = True) -> dict[bytes, Rule]:
    return dict.fromkeys((b"GET", b"HEAD"), Rule(operation, answers_cbor=answers_cbor))


def _asks(
    operation: Operation, limit_bytes: int, secrets: frozenset[str] = gbs_paths_headers.NO_SECRETS
) -> dict[bytes, Rule]:
    return {b"POST": Rule(operation, secrets, limit_bytes, answers_cbor=True)}


def _complains(operation: Operation) -> dict[bytes, Rule]:
    return {b"POST": Rule(operation, body_limit_bytes=gbs_cbor_bodies.MAX_CORRUPT_BYTES)}


_RULES: dict[Resource, dict[bytes, Rule]] = {
    Resource.VERSION: _reads(Operation.VERSION),
    Resource.ALLOCATE: _asks(
        Operation.ALLOCATE,
        gbs_cbor_bodies.MAX_ALLOCATE_BYTES,
        gbs_paths_headers.ALLOCATE_SECRETS,
    ),
    Resource.BUNDLE: _asks(Operation.BUNDLE, gbs_bundles.MAX_BUNDLE_BYTES),
    Resource.SURVEY: _asks(Operation.SURVEY, gbs_surveys_releases.MAX_SURVEY_BYTES),
    Resource.READ_BUNDLE: _asks(Operation.READ_BUNDLE, gbs_bundles.MAX_READ_BUNDLE_BYTES),
    Resource.RELEASE_LEASES: _asks(
        Operation.RELEASE_LEASES, gbs_surveys_releases.MAX_RELEASE_BYTES
    ),
    Resource.SHARES: _reads(Operation.LIST),
    Resource.SHARE: {
        **_reads(Operation.READ, answers_cbor=False),
        b"PATCH": Rule(Operation.WRITE, gbs_paths_headers.UPLOAD_SECRETS, None, answers_cbor=True),
    },
    Resource.ABORT: {b"PUT": Rule(Operation.ABORT, gbs_paths_headers.UPLOAD_SECRETS)},
    Resource.CORRUPT: _complains(Operation.CORRUPT),
    Resource.LEASE: {b"PUT": Rule(Operation.LEASE, gbs_paths_headers.LEASE_SECRETS)},
    Resource.MUTABLE_READ_TEST_WRITE: _asks(
        Operation.READ_TEST_WRITE,
        gbs_mutable.MAX_REQUEST_BYTES,
        gbs_paths_headers.MUTABLE_SECRETS,
    ),
    Resource.MUTABLE_SHARES: _reads(Operation.SLOT_LIST),
    Resource.MUTABLE_SHARE: _reads(Operation.SLOT_READ, answers_cbor=False),
    Resource.MUTABLE_CORRUPT: _complains(Operation.SLOT_CORRUPT),
}
_BAD_HOST = responses.text(400, "a request of HTTP/1.1 needs one Host header with a valid host")
_NO_SUCH_METHOD = {
    resource: responses.page(405, b"Allow: %s\r\n" % b", ".join(rules))
    for resource, rules in _RULES.items()
}


@attrs.frozen
class AdmittedRequest:
    """
    A request that passed all checks of its head.

    Attributes:
        owner: the number of the named client whose secret the request has; 0 for the server's own secret.
    """

    rule: Rule
    target: GbsTarget
    secrets: dict[str, bytes] = attrs.field(repr=False)
    client: Client = NOBODY
    owner: int = 0

    @property
    def lease(self) -> LeaseSecrets:
        """The lease secrets of a request whose operation requires them."""
        return LeaseSecrets(
            self.secrets[gbs_paths_headers.RENEW_SECRET],
            self.secrets[gbs_paths_headers.CANCEL_SECRET],
            self.owner,
        )


class KnownSecrets:
    """
    The secrets with which clients may use a server: the server's own, and those of named clients.

    Args:
        swissnum: the server's own secret.
    """

    def __init__(self, swissnum: str) -> None:
        self._own = gbs_paths_headers.authorization(swissnum), 0
        self._known = [self._own]

    def set_clients(self, numbers: Mapping[str, int]) -> None:
        """Accept the given named clients, and no others; ``numbers`` has their numbers by their secrets."""
        more = [(gbs_paths_headers.authorization(each), numbers[each]) for each in numbers]
        self._known = [self._own, *more]

    def owner_of(self, request: Request) -> int | None:
        """
        Return the number of the client whose secret a request has; 0 for the server's own secret; None for an
        unknown one.

        The request's secret is compared with every known secret, in constant time.
        """
        shown = request.headers.get(b"authorization", b"")
        owners = [owner for secret, owner in self._known if hmac.compare_digest(shown, secret)]
        return owners[0] if owners else None


def admit(request: Request, known: KnownSecrets) -> AdmittedRequest | Answer:
    """
    Return the checked request, or the answer that rejects it.

    The order of the checks is part of the interface: first 400 for a missing or ambiguous host, then 404 and
    405, then 401, then 400 for the secrets, then 406, 415 and 413.

    Args:
        known: the accepted secrets; the client must have sent one of them.
    """
    if not request.names_its_host:
        return _BAD_HOST
    target = request.target
    rules = None if target is None else _RULES.get(target.resource)
    if target is None or rules is None:
        return responses.NO_PAGE
    rule = rules.get(request.method)
    if rule is None:
        return _NO_SUCH_METHOD[target.resource]
    headers = request.headers
    owner = known.owner_of(request)
    if owner is None:
        return responses.UNAUTHORIZED
    try:
        secrets = gbs_paths_headers.parse_secrets(request.secrets, rule.secrets)
    except ValueError as error:
        return responses.text(400, str(error))
    if rule.answers_cbor and not accepts_cbor(headers.get(b"accept")):
        return responses.NOT_ACCEPTABLE
    if rule.body_limit_bytes:
        content_type = headers.get(b"content-type")
        if content_type is not None and not _is_cbor(content_type):
            return responses.WRONG_TYPE
        if request.content_length is not None and request.content_length > rule.body_limit_bytes:
            return responses.TOO_LARGE
    return AdmittedRequest(rule, target, secrets, request.client, owner)


def accepts_cbor(accept: bytes | None) -> bool:
    """
    Return whether the entry of an Accept header with the highest quality is CBOR; False for ``*/*``, True for
    a missing header.
    """
    if accept is None:
        return True
    best, best_quality = b"", 0.0
    for entry in accept.split(b","):
        kind, *parameters = (part.strip() for part in entry.split(b";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith(b"q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if quality > best_quality:
            best, best_quality = kind, quality
    return best.lower() == gbs_paths_headers.CONTENT_TYPE.encode("ascii")


def _is_cbor(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == gbs_paths_headers.CONTENT_TYPE.encode(
        "ascii"
    )

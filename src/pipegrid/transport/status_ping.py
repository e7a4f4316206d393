"""
Reports to a monitor, such as healthchecks.io, that a job has begun, succeeded or failed: one GET for each
report.

The requests use only the ways that the connection settings permit. Redirects are not followed, and no byte of
a response's body is read.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from twisted.internet.defer import CancelledError, TimeoutError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.task import deferLater
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from pipegrid.core.text import printable
from pipegrid.errors import PipegridError, UsageError
from pipegrid.http11.agent import PipelinedAgent
from pipegrid.http11.endpoints import ProxyEndpoints, StandardEndpoints
from pipegrid.reactor.connection_policy import ConnectionPolicy
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_through

TIMEOUT_S = 10.0
"""The time limit of one attempt."""

ATTEMPTS = 3
PAUSE_S = 2.0
"""The pause between two attempts."""

MAX_URL_BYTES = 2000


def check_ping_url(text: str) -> str:
    """
    Return the URL of a monitor after checking it: ``https`` or ``http``, a host, no user name, printable
    ASCII, at most ``MAX_URL_BYTES``.

    Raises:
        ValueError: the text is not such a URL; the error's text is a clause.
    """
    try:
        parts = urlsplit(text)
        usable = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0  # raises ValueError if the port is invalid
            and text.isascii()
            and text.isprintable()
            and " " not in text
            and len(text) <= MAX_URL_BYTES
            and "@" not in parts.netloc
            and "\\" not in parts.netloc
        )
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("it must be a URL such as https://hc-ping.com/UUID")
    return text


def url_of(url: str, event: str) -> str:
    """
    Return the URL for an event: "start", "fail", or "" for success. The event is added to the path, before
    the query.
    """
    parts = urlsplit(url)
    path = f"{parts.path.rstrip('/')}/{event}" if event else parts.path or "/"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


@implementer(IAgentEndpointFactory)
class PermittedEndpoints:
    """
    Endpoints on the ways that a policy permits. Direct connections go through the proxy that the environment
    names, if there is one.
    """

    def __init__(self, reactor: Any, policy: ConnectionPolicy) -> None:
        self._reactor = reactor
        self._policy = policy
        self._inner = StandardEndpoints(reactor)
        self._direct = ProxyEndpoints(reactor, inner=self._inner)

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        host = uri.host.decode("ascii")
        if self._policy.is_direct_to(host):
            return self._direct.endpointForURI(uri)
        endpoint = endpoint_through(self._policy, self._reactor, host, uri.port)
        return self._inner.over_tls(endpoint, uri) if uri.scheme == b"https" else endpoint


async def ping(
    reactor: Any,
    policy: ConnectionPolicy,
    url: str,
    event: str = "",
    endpoints: IAgentEndpointFactory | None = None,
) -> str | None:
    """
    Report an event; returns None, or an error as a sentence without the URL's path, which may be a secret.

    Args:
        url: from ``check_ping_url``.
        event: see ``url_of``.
        endpoints: how to connect, instead of ``PermittedEndpoints``.
    """
    target = url_of(url, event).encode("ascii")
    problem: str | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            await deferLater(reactor, PAUSE_S)
        agent = PipelinedAgent(reactor, endpoints or PermittedEndpoints(reactor, policy))
        try:
            problem, is_final = await _attempt(reactor, agent, target)
        finally:
            agent.close().addErrback(lambda _: None)
        if problem is None or is_final:
            break
    if problem is None:
        return None
    host = urlsplit(url).hostname
    return f"cannot ping {host}: {problem.rstrip('.')}"


async def _attempt(reactor: Any, agent: PipelinedAgent, target: bytes) -> tuple[str | None, bool]:
    """
    Send one request; returns the error (None: success), and whether the outcome is final, so that another
    attempt would be useless.
    """
    try:
        asked = agent.request(b"GET", target, timeout_s=TIMEOUT_S)
        response = await asked.addTimeout(TIMEOUT_S, reactor)
    except CancelledError:
        raise
    except TimeoutError:
        return f"no answer within {TIMEOUT_S:g} s", False
    except UsageError as error:
        return str(error), True
    except Exception as error:
        text = printable(str(error) or type(error).__name__)
        return (text if isinstance(error, PipegridError) else text[:300]), False
    status = response.code
    if 200 <= status < 300:
        return None, True
    if 300 <= status < 400:
        return f"it answers {status}, a redirect, which is not followed; give its target", True
    return f"it answers {status}", status < 500

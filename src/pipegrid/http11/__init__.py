"""
Pipelined HTTP/1.1 for any Twisted program.

``PipelinedAgent`` is an ``IAgent``, which treq can use as well. ``HostPool`` sends raw requests to one host,
and ``PipelinedConnection`` sends them on one connection. ``PinnedEndpoints`` and ``ProxyEndpoints`` make the
connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipegrid.http11.agent import PipelinedAgent
    from pipegrid.http11.connection import PipelinedConnection
    from pipegrid.http11.connection_limits import Limits
    from pipegrid.http11.connection_loss import Loss, Owner, Unanswered
    from pipegrid.http11.endpoints import ProxyEndpoints, StandardEndpoints, TunnelRefused
    from pipegrid.http11.exchange import (
        AgentClosed,
        Exchange,
        RawExchange,
        RawRequest,
        RawResponse,
        RequestBodyError,
        RequestMaybeProcessed,
        RequestNotSent,
        RequestTimedOut,
        ResponseError,
        TooManyRequests,
        UntrustedCertificate,
        WrongServerKey,
    )
    from pipegrid.http11.host_pool import HostPool
    from pipegrid.http11.pinned_endpoints import PinnedEndpoints
    from pipegrid.http11.pinned_key import pin_endpoint, public_key_pin
    from pipegrid.http11.proxy_settings import Proxy, proxy_for, read_proxy

_HOMES = {
    "agent": {"PipelinedAgent"},
    "connection": {"PipelinedConnection"},
    "connection_loss": {"Loss", "Owner", "Unanswered"},
    "endpoints": {"ProxyEndpoints", "StandardEndpoints", "TunnelRefused"},
    "host_pool": {"HostPool"},
    "connection_limits": {"Limits"},
    "pinned_endpoints": {"PinnedEndpoints"},
    "pinned_key": {"pin_endpoint", "public_key_pin"},
    "proxy_settings": {"Proxy", "proxy_for", "read_proxy"},
}

__all__ = [
    "AgentClosed",
    "Exchange",
    "HostPool",
    "Limits",
    "Loss",
    "Owner",
    "PinnedEndpoints",
    "PipelinedAgent",
    "PipelinedConnection",
    "Proxy",
    "ProxyEndpoints",
    "RawExchange",
    "RawRequest",
    "RawResponse",
    "RequestBodyError",
    "RequestMaybeProcessed",
    "RequestNotSent",
    "RequestTimedOut",
    "ResponseError",
    "StandardEndpoints",
    "TooManyRequests",
    "TunnelRefused",
    "Unanswered",
    "UntrustedCertificate",
    "WrongServerKey",
    "pin_endpoint",
    "proxy_for",
    "public_key_pin",
    "read_proxy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "exchange")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)

"""
Pipelined HTTP/1.1 for any Twisted program.

* ``PipelinedAgent``: an ``IAgent``; treq runs on it.
* ``HostPool``: raw requests to one host, over as many connections as they need.
* ``PipelinedConnection``: raw requests on one connection, in order, repeated by nobody.
* ``PinnedEndpoints``, ``pin_endpoint``: TLS to the owner of one key.
"""

from __future__ import annotations

from pipegrid.http11.agent import PipelinedAgent
from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.endpoints import (
    PinnedEndpoints,
    StandardEndpoints,
    pin_endpoint,
    public_key_pin,
)
from pipegrid.http11.errors import (
    RequestBodyError,
    RequestMaybeProcessed,
    RequestNotSent,
    RequestTimedOut,
    ResponseError,
    TooManyRequests,
    WrongServerKey,
)
from pipegrid.http11.limits import Limits
from pipegrid.http11.pool import HostPool
from pipegrid.http11.raw import RawRequest, RawResponse

__all__ = [
    "HostPool",
    "Limits",
    "PinnedEndpoints",
    "PipelinedAgent",
    "PipelinedConnection",
    "RawRequest",
    "RawResponse",
    "RequestBodyError",
    "RequestMaybeProcessed",
    "RequestNotSent",
    "RequestTimedOut",
    "ResponseError",
    "StandardEndpoints",
    "TooManyRequests",
    "WrongServerKey",
    "pin_endpoint",
    "public_key_pin",
]

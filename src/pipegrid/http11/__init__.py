"""
Pipelined HTTP/1.1 for any Twisted program.

* ``PipelinedAgent``: an ``IAgent``; treq runs on it.
* ``HostPool``: raw requests to one host, over as many connections as they need.
* ``PipelinedConnection``: raw requests on one connection, in order; its ``Owner`` decides what is repeated.
* ``Exchange``, ``RawExchange``: one request and its answer, for those to whom even a Deferred is too much.
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
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.limits import Limits
from pipegrid.http11.loss import Loss, Owner, Unanswered
from pipegrid.http11.pool import HostPool
from pipegrid.http11.raw import RawExchange, RawRequest, RawResponse

__all__ = [
    "Exchange",
    "HostPool",
    "Limits",
    "Loss",
    "Owner",
    "PinnedEndpoints",
    "PipelinedAgent",
    "PipelinedConnection",
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
    "Unanswered",
    "WrongServerKey",
    "pin_endpoint",
    "public_key_pin",
]

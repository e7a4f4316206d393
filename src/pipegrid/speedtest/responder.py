"""A small service that lets the path to a host be measured. (Interface first.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.speedtest.baseline import Responder


@attrs.frozen
class ResponderSettings:
    """
    What a responder does for whoever has its token.

    Attributes:
        max_bytes: that it takes and sends in all, until it ends.
        max_seconds: after which it ends.
        max_connections: at a time.
    """

    host: str
    port: int
    token: str
    max_bytes: int = 10**10
    max_seconds: float = 3600.0
    max_connections: int = 64


def responder_main(
    reactor: Any, settings: ResponderSettings, say: Callable[[str], object] = print
) -> Deferred[None]:
    """Listen, say where, and respond until a limit is reached or until cancelled."""
    raise NotImplementedError


class RunningResponders:
    """
    Responders in child processes of this machine.

    Attributes:
        responders: where they are; behind a proxy, ``attrs.evolve(responder, port=...)``.
    """

    responders: list[Responder]

    def stop(self) -> Deferred[None]:
        """End them."""
        raise NotImplementedError


def start_responders(reactor: Any, count: int) -> Deferred[RunningResponders]:
    """Start so many, each a process on 127.0.0.1, with a token made for them."""
    raise NotImplementedError

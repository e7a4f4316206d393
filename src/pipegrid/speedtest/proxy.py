"""An emulated link as a TCP proxy in a process of its own. (Interface first.)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.simulation.relay import LinkShape


@attrs.frozen
class Pair:
    """Where to listen, and where to go on to."""

    listen_host: str
    listen_port: int
    target_host: str
    target_port: int


def parse_pair(text: str) -> Pair:
    """Return what ``8000=example.net:80`` or ``127.0.0.1:0=localhost:80`` says; UsageError otherwise."""
    raise NotImplementedError


def proxy_main(
    reactor: Any, shape: LinkShape, pairs: Sequence[Pair], say: Callable[[str], object] = print
) -> Deferred[None]:
    """Listen, say where, and relay until cancelled."""
    raise NotImplementedError


class RunningProxy:
    """
    A proxy in a child process.

    Attributes:
        ports: on 127.0.0.1, one for each target, in order.
    """

    ports: list[int]

    def stop(self) -> Deferred[None]:
        """End it."""
        raise NotImplementedError


def start_proxy(
    reactor: Any, shape: LinkShape, targets: Sequence[tuple[str, int]]
) -> Deferred[RunningProxy]:
    """Start a process that relays to each target (host, port) over one link, which all share."""
    raise NotImplementedError

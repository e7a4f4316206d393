"""An emulated link as a TCP proxy, in this process or a child process."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.tcp import Port

from pipegrid.errors import UsageError
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.speedtest.child_processes import ChildProcess, be_child, start_child
from pipegrid.testing.clock import PreciseClock
from pipegrid.testing.link_relay import LinkShape, RelayFactory, SharedLink

#     pipegrid speedtest proxy --rtt 11ms --up 80kB/s --down 520kB/s 8000=example.net:80
#         8001=example.net:443
#
# All pairs share one link, with separate directions; up is from the connecting client to the target.
# ``docs/explanation-links.md`` describes its exactness. A speed test runs it in a separate process, so that
# it does not use the CPU time of either side.

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
NICER = 10
"""The niceness, so that a link does not become slower when the programs at its ends are busy."""

_HOST = r"\[[0-9A-Fa-f:.]+\]|[^\s:=\[\]]+"
_PAIR = re.compile(rf"(?:({_HOST}):)?([0-9]{{1,5}})=({_HOST}):([0-9]{{1,5}})")
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")


@attrs.frozen
class Forwarding:
    """Where to listen (port 0: any free one), and the target."""

    listen_host: str
    listen_port: int
    target_host: str
    target_port: int


def parse_pair(text: str) -> Forwarding:
    """
    Parse ``8000=example.net:80`` or ``[::1]:0=localhost:80``; it listens on 127.0.0.1 by default.

    Raises:
        UsageError: it is malformed.
    """
    match = _PAIR.fullmatch(text)
    if match is None or int(match[2]) > 65535 or not 1 <= int(match[4]) <= 65535:
        raise UsageError(
            f"{text!r} does not say what to relay; write PORT=HOST:PORT, such as 8000=example.net:80"
        )
    listen_host = (match[1] or LOOPBACK).strip("[]")
    return Forwarding(listen_host, int(match[2]), match[3].strip("[]"), int(match[4]))


@as_deferred
async def proxy_main(
    reactor: Any,
    shape: LinkShape,
    pairs: Sequence[Forwarding],
    say: Callable[[str], object] = print,
) -> None:
    """
    Relay until cancelled; then stop listening, and fire.

    Args:
        say: called with a line for each pair: where it listens.

    Fails with UsageError: a port cannot be opened.
    """
    clock = PreciseClock(reactor)
    ports: list[Port] = []
    try:
        for port, pair in zip(listen(reactor, clock, shape, pairs, ports), pairs, strict=True):
            found = port.getHost()
            target = _address(pair.target_host, pair.target_port)
            say(f"{_address(found.host, found.port)} -> {target}")
        forever: Deferred[None] = Deferred()
        await forever
    except CancelledError:
        pass  # the usual end
    finally:
        for port in ports:
            await maybeDeferred(port.stopListening)
        clock.close()


def listen(
    reactor: Any,
    clock: PreciseClock,
    shape: LinkShape,
    pairs: Sequence[Forwarding],
    ports: list[Port],
) -> list[Port]:
    """
    Listen for all pairs, over one link.

    Args:
        ports: opened ports are appended, so that the caller can close them if one cannot be opened.

    Raises:
        UsageError: a port cannot be opened.
    """
    link = SharedLink(clock, shape, clock.early_s, clock.behind_s)
    for pair in pairs:
        factory = RelayFactory(link, _endpoint(reactor, pair))
        try:
            port = reactor.listenTCP(
                pair.listen_port, factory, backlog=BACKLOG, interface=pair.listen_host
            )
        except CannotListenError as error:
            reason = getattr(error.socketError, "strerror", None) or error.socketError
            raise UsageError(
                f"cannot listen on {_address(pair.listen_host, pair.listen_port)}: {reason}; "
                "choose another port"
            ) from error
        ports.append(port)
    return ports


def _endpoint(reactor: Any, pair: Forwarding) -> IStreamClientEndpoint:
    if _IPV4.fullmatch(pair.target_host):  # needs no resolver, and none of its threads
        return TCP4ClientEndpoint(reactor, pair.target_host, pair.target_port)
    return HostnameEndpoint(reactor, pair.target_host, pair.target_port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@attrs.frozen
class RunningProxy:
    """
    A proxy in a child process.

    Attributes:
        ports: on 127.0.0.1, one for each target, in order.
    """

    ports: list[int]
    _child: ChildProcess

    @property
    def pid(self) -> int:
        return self._child.pid

    def stop(self) -> Deferred[None]:
        """Stop the process; fires when it has ended."""
        return self._child.stop()


@as_deferred
async def start_proxy(
    reactor: Any, shape: LinkShape, targets: Sequence[tuple[str, int]]
) -> RunningProxy:
    """Start a process that relays to each target (host, port) over one shared link."""
    job = {"shape": attrs.asdict(shape), "targets": list(targets)}
    child = await start_child(reactor, "pipegrid.speedtest.link_proxy", job)
    return RunningProxy([int(port) for port in child.said], child)


def _child(reactor: Any, job: Any) -> list[int]:
    with contextlib.suppress(OSError):  # only root may
        os.nice(-NICER)
    pairs = [Forwarding(LOOPBACK, 0, host, port) for host, port in job["targets"]]
    shape = LinkShape(**job["shape"])
    ports = listen(reactor, PreciseClock(reactor), shape, pairs, [])
    return [cast(int, port.getHost().port) for port in ports]


if __name__ == "__main__":
    be_child(_child)

"""
Emulated links: their profiles, the notation for their round-trip times and rates, and TCP proxies over them,
in this process or a child process.
"""

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
from pipegrid.speedtest.child_processes import LOOPBACK, ChildProcess, be_child, start_child
from pipegrid.speedtest.run_results import EmulatedLink
from pipegrid.testing.clock import PreciseClock
from pipegrid.testing.link_relay import LinkShape, RelayFactory, SharedLink

# Units are decimal: 1 kB is 1000 bytes, 1 Mbit/s is 125 000 bytes a second. A ``b`` alone would be
# ambiguous, so a byte is ``B`` and a bit is ``bit``. Times are in ``us``, ``ms`` or ``s``.

CUSTOM = "custom"
UNLIMITED = "unlimited"
PROFILES = {
    link.name: link
    for link in (
        # The link on which pipelining was first measured.
        EmulatedLink("dsl", 0.011, 80e3, 520e3),
        # Two machines in one rack: latency only.
        EmulatedLink("colo", 0.00012),
        # A good connection to another country, 100 Mbit/s; half a megabyte fits in flight.
        EmulatedLink("wan", 0.040, 12.5e6, 12.5e6),
        # A long and fast link, 1 Gbit/s; 25 MB fit in flight.
        EmulatedLink("lfn", 0.200, 125e6, 125e6),
    )
}
MAX_RTT_S = 60.0
MAX_BYTES_PER_S = 1e12
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_BYTES_A_UNIT = {"B": 1.0, "bit": 0.125}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
_TIME = re.compile(_NUMBER + r"\s*(us|µs|ms|s)")
_RATE = re.compile(_NUMBER + r"\s*([kKMG]?)(B|bit)(?:/s|ps)")


def parse_time(text: str) -> float:
    """
    Return the seconds that a text means, such as ``11ms``, ``0.12ms``, ``120us`` or ``0.2s``.

    Raises:
        UsageError: the text is malformed, or means more than a minute.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _TIMES[match[2]] if match else -1.0
    if not 0 <= seconds <= MAX_RTT_S:
        raise UsageError(
            f"{text!r} is not a round trip; write it as 11ms, 0.12ms or 0.2s, up to 60s"
        )
    return seconds


def parse_rate(text: str) -> float | None:
    """
    Return the bytes per second that a text means, such as ``80kB/s``, ``10Mbit/s`` or ``1Gbit/s``; None for
    ``unlimited``.

    Raises:
        UsageError: the text is malformed, or the rate is less than a byte per second, or too large.
    """
    if text.strip() == UNLIMITED:
        return None
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match:
        rate = float(match[1]) * _PREFIXES[match[2]] * _BYTES_A_UNIT[match[3]]
    if not 1 <= rate <= MAX_BYTES_PER_S:
        raise UsageError(
            f"{text!r} is not a bandwidth; write it as 80kB/s (bytes) or 10Mbit/s (bits), or as unlimited"
        )
    return rate


def make_link(
    profile: str | None = None,
    rtt: str | None = None,
    up: str | None = None,
    down: str | None = None,
) -> EmulatedLink | None:
    """
    Return the link that these options describe; None if no option is given.

    Args:
        profile: the name of one of ``PROFILES``; the other options override its values.
        rtt, up, down: texts for ``parse_time`` and ``parse_rate``.

    Raises:
        UsageError: an option is malformed.
    """
    if profile is None:
        if rtt is None and up is None and down is None:
            return None
        link = EmulatedLink(CUSTOM, 0.0)
    elif profile in PROFILES:
        link = PROFILES[profile]
    else:
        raise UsageError(
            f"there is no link called {profile!r}; choose one of {', '.join(PROFILES)}, "
            "or say what it is like with --rtt, --up and --down"
        )
    changed = attrs.evolve(
        link,
        rtt_s=link.rtt_s if rtt is None else parse_time(rtt),
        up_bytes_per_s=link.up_bytes_per_s if up is None else parse_rate(up),
        down_bytes_per_s=link.down_bytes_per_s if down is None else parse_rate(down),
    )
    return link if changed == link else attrs.evolve(changed, name=CUSTOM)


def shape_of(link: EmulatedLink) -> LinkShape:
    """Return the parameters for the relay, with rates in whole bytes per second."""
    return LinkShape(link.rtt_s, _whole(link.up_bytes_per_s), _whole(link.down_bytes_per_s))


def describe(link: EmulatedLink | None) -> str:
    """Return a short description for people, such as ``dsl (11 ms, 80 kB/s up, 520 kB/s down)``."""
    if link is None:
        return "the network as it is"
    rates = f"{_rate_text(link.up_bytes_per_s)} up, {_rate_text(link.down_bytes_per_s)} down"
    return f"{link.name} ({link.rtt_s * 1000:g} ms, {rates})"


def _whole(rate: float | None) -> int | None:
    return None if rate is None else max(1, round(rate))


def _rate_text(rate: float | None) -> str:
    if rate is None:
        return UNLIMITED
    for prefix, factor in (("M", 1e6), ("k", 1e3)):
        if rate >= factor:
            return f"{rate / factor:g} {prefix}B/s"
    return f"{rate:g} B/s"


#     pipegrid speedtest proxy --rtt 11ms --up 80kB/s --down 520kB/s 8000=example.net:80 8001=example.net:443
#
# All pairs share one link, with separate directions; up is from the connecting client to the target.
# ``docs/explanation-links.md`` describes how exact the link is. A speed test runs the proxy in a separate
# process, so that it does not use the CPU time of client or servers.

BACKLOG = 1024
NICER = 10
"""How much to lower the niceness of a proxy, so that busy programs at its ends do not slow down the link."""

_HOST = r"\[[0-9A-Fa-f:.]+\]|[^\s:=\[\]]+"
_PAIR = re.compile(rf"(?:({_HOST}):)?([0-9]{{1,5}})=({_HOST}):([0-9]{{1,5}})")
_IPV4 = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}")


@attrs.frozen
class Forwarding:
    """The address to listen on (port 0: any free port), and the target."""

    listen_host: str
    listen_port: int
    target_host: str
    target_port: int


def parse_pair(text: str) -> Forwarding:
    """
    Parse ``8000=example.net:80`` or ``[::1]:0=localhost:80``; without an address to listen on, 127.0.0.1 is
    used.

    Raises:
        UsageError: the text is malformed.
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
    Relay until the Deferred is cancelled; then stop listening, and fire.

    Args:
        say: called with a line for each pair, which says where the proxy listens and what the target is.

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
        pass  # the usual way to end the proxy
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
        ports: opened ports are appended to this list, so that the caller can close them if a later port
            cannot be opened.

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
    if _IPV4.fullmatch(pair.target_host):  # an address needs no resolver and no thread
        return TCP4ClientEndpoint(reactor, pair.target_host, pair.target_port)
    return HostnameEndpoint(reactor, pair.target_host, pair.target_port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def start_proxy(
    reactor: Any, shape: LinkShape, targets: Sequence[tuple[str, int]]
) -> Deferred[ChildProcess]:
    """
    Start a process that relays to each target (host, port) over one shared link.

    The Deferred fires when the process has reported its ports on 127.0.0.1, one for each target, in order.
    """
    job = {"shape": attrs.asdict(shape), "targets": list(targets)}
    return start_child(reactor, "pipegrid.speedtest.link_proxies", job)


def _child(reactor: Any, job: Any) -> list[int]:
    with contextlib.suppress(OSError):  # only root may do so
        os.nice(-NICER)
    pairs = [Forwarding(LOOPBACK, 0, host, port) for host, port in job["targets"]]
    shape = LinkShape(**job["shape"])
    ports = listen(reactor, PreciseClock(reactor), shape, pairs, [])
    return [cast(int, port.getHost().port) for port in ports]


if __name__ == "__main__":
    be_child(_child)

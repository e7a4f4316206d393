"""Profiles of emulated links, and the notation of their round-trip times and rates."""

from __future__ import annotations

import re

import attrs

from pipegrid.errors import UsageError
from pipegrid.speedtest.run_results import EmulatedLink
from pipegrid.testing.link_relay import LinkShape

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
        # A good connection to another country: 100 Mbit/s; half a megabyte is in flight.
        EmulatedLink("wan", 0.040, 12.5e6, 12.5e6),
        # Long and fast, 1 Gbit/s: 25 MB are in flight.
        EmulatedLink("lfn", 0.200, 125e6, 125e6),
    )
}
MAX_RTT_S = 60.0
MAX_BYTES_PER_S = 1e12
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_BYTES_A_UNIT = {"B": 1.0, "bit": 0.125}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})"
_TIME = re.compile(_NUMBER + r"\s*(us|µs|ms|s)")
_RATE = re.compile(_NUMBER + r"\s*([kKMG]?)(B|bit)(?:/s|ps)")


def parse_time(text: str) -> float:
    """
    Return seconds: ``11ms``, ``0.12ms``, ``120us``, ``0.2s``.

    Raises:
        UsageError: it is malformed, or more than a minute.
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
    Return bytes a second: ``80kB/s``, ``10Mbit/s``, ``1Gbit/s``; None for ``unlimited``.

    Raises:
        UsageError: it is malformed, less than a byte a second, or too large.
    """
    if text.strip() == UNLIMITED:
        return None
    match = _RATE.fullmatch(text.strip())
    rate = 0.0
    if match:
        prefix = match[2].replace("K", "k")
        rate = float(match[1]) * _PREFIXES[prefix] * _BYTES_A_UNIT[match[3]]
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
    Return the link of these options; None if none is given.

    Args:
        profile: name of one of ``PROFILES``; the other options change it.
        rtt, up, down: as for ``parse_time`` and ``parse_rate``.

    Raises:
        UsageError: one of them is malformed.
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
    """Return the relay's parameters; rates in whole bytes a second."""
    return LinkShape(link.rtt_s, _whole(link.up_bytes_per_s), _whole(link.down_bytes_per_s))


def describe(link: EmulatedLink | None) -> str:
    """Return a short text for people: ``dsl (11 ms, 80 kB/s up, 520 kB/s down)``."""
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

"""
The scenarios of the speed test: how many files of which size they transfer, in which order, with which
settings. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import attrs

from pipegrid.core import layout
from pipegrid.core.encoding_parameters import MAX_LITERAL_BYTES, Params
from pipegrid.errors import UsageError
from pipegrid.speedtest.run_results import (
    COLD_START,
    DOWN,
    ENCODING,
    SCENARIO,
    UP,
    WINDOW,
    EmulatedLink,
)

KB = 10**3
MB = 10**6

STARTUP = "startup"
COMMAND = "command 200B"
AUTO = "auto"

WINDOWS = (10 * KB, 30 * KB, 50 * KB, 100 * KB, 300 * KB, MB, 4 * MB, 16 * MB)
"""Windows of the sweep, in bytes; 50 KB is the former default, 16 MB more than any emulated link needs."""

ENCODINGS = ((1, 1), (1, 10), (3, 5), (3, 10), (7, 10), (10, 10))
"""Pairs of required and total shares."""

MIXED_FILES = 1000
MIXED_SMALLEST, MIXED_LARGEST = 100, 100 * KB
_MIXED_SEED = 1000  # equal sizes in all runs make the runs comparable

SWEEP_S = 0.5
"""How long a transfer of the window sweep should take at the link's rate, without round trips."""
SWEEP_SEGMENT_BYTES = 192 << 10
"""
The segment size of the window sweep's file. With 3 required shares, blocks then have 64 KiB, the smallest
message of a share upload. A block is sent as a whole, so with segments of 1 MiB even a small window would
send 350 KB at a time.
"""
SWEEP_LEAST, SWEEP_MOST = 100 * KB, 30 * MB
_SWEEP_UNLIMITED = 10 * MB

ALL_ROUNDS_S = 75.0
"""Time limit for all rounds of one scenario, counting only the link: a full run should take five minutes."""

MAX_TRANSFER_S = 60.0
"""A scenario is left out if one of its transfers takes longer than this, counting only the link."""


@attrs.frozen
class Scenario:
    """
    Some files, stored and read back; both directions are measured separately.

    Attributes:
        name: unique in its group.
        group: see ``run_results.GROUPS``.
        sizes: of the files, in bytes, each too large for a literal cap.
        at_once: whether the files are transferred at the same time, not one after the other.
        fresh: whether a new client is used, so that connecting is included.
        window_bytes: the window of the pipelines; None is the run's window.
        fixed_window: whether ``window_bytes`` applies even if None, which then means ``auto``, as in the
            window sweep.
        encoding: required and total shares, if other than those of the run.
        segment_bytes: the segment size, if other than that of the run.
        fetches: whether reading the files back is measured, too.
        most_rounds: the most rounds, for scenarios that take long; None for no limit.
    """

    name: str
    group: str
    sizes: tuple[int, ...]
    at_once: bool = False
    fresh: bool = False
    window_bytes: int | None = None
    fixed_window: bool = False
    encoding: tuple[int, int] | None = None
    segment_bytes: int | None = None
    fetches: bool = True
    most_rounds: int | None = None

    @property
    def title(self) -> str:
        """
        A name that is unique among all scenarios: the window sweep's ``1MB`` has the title ``window 1MB``.
        """
        return f"{WINDOW} {self.name}" if self.group == WINDOW else self.name

    @property
    def files(self) -> int:
        """How many files there are."""
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        """The plaintext bytes of all files together."""
        return sum(self.sizes)

    @property
    def mean_bytes(self) -> int:
        """The mean plaintext bytes of a file, rounded."""
        return round(self.total_bytes / self.files)

    def params(self, default: Params) -> Params:
        """Return the encoding parameters of the scenario's files."""
        if self.segment_bytes is not None:
            default = attrs.evolve(default, max_segment_bytes=self.segment_bytes)
        if self.encoding is None:
            return default
        required, total = self.encoding
        return attrs.evolve(default, required_shares=required, total_shares=total)

    def wire_bytes(self, direction: str, default: Params) -> int:
        """Return the bytes of shares that have to pass the link, for all files."""
        params = self.params(default)
        shares = params.total_shares if direction == UP else params.required_shares
        return shares * sum(share_bytes(size, params) for size in self.sizes)

    def stored_bytes(self, default: Params, rounds: int) -> int:
        """
        Return about how many bytes all rounds store on the servers' disks; one round is added for warming up.
        """
        if self.most_rounds is not None:
            rounds = min(rounds, self.most_rounds)
        return (rounds + 1) * self.wire_bytes(UP, default)

    def counts_in(self, round_number: int) -> bool:
        """Return whether a round, counted from 0, includes this scenario."""
        return self.most_rounds is None or round_number < self.most_rounds


def share_bytes(size: int, params: Params) -> int:
    """Return the length in bytes of each share of a file; 0 for a literal cap."""
    if size <= MAX_LITERAL_BYTES:
        return 0
    return layout.share_bytes(params.geometry(size))


def size_name(size: int) -> str:
    """Return a size in the notation of scenarios: ``200B``, ``10KB``, ``100MB``."""
    for unit, letters in ((MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size / unit:g}{letters}"
    return f"{size}B"


def series(count: int, size: int, most_rounds: int | None = None) -> Scenario:
    """Return the classic scenario of small files, one after the other."""
    return Scenario(
        f"{count}x {size_name(size)}", SCENARIO, (size,) * count, most_rounds=most_rounds
    )


def large(size: int, most_rounds: int | None = None) -> Scenario:
    """Return the classic scenario of one large file."""
    return Scenario(size_name(size), SCENARIO, (size,), most_rounds=most_rounds)


def mixed() -> Scenario:
    """
    Return a scenario of files with sizes spread evenly over the orders of magnitude, transferred at the same
    time. The sizes are always the same.
    """
    rng = random.Random(_MIXED_SEED)
    ratio = MIXED_LARGEST / MIXED_SMALLEST
    sizes = tuple(round(MIXED_SMALLEST * ratio ** rng.random()) for _ in range(MIXED_FILES))
    return Scenario(f"{MIXED_FILES} mixed sizes", SCENARIO, sizes, at_once=True, most_rounds=2)


def window_sweep(
    size: int, windows: Iterable[int] = WINDOWS, most_rounds: int | None = None
) -> list[Scenario]:
    """Return the window sweep: the same file with each fixed window, and with the automatic one."""
    points: list[int | None] = [*windows, None]
    return [
        Scenario(
            AUTO if window is None else size_name(window),
            WINDOW,
            (size,),
            window_bytes=window,
            fixed_window=True,
            segment_bytes=SWEEP_SEGMENT_BYTES,
            fetches=False,  # a window limits only sending
            most_rounds=most_rounds,
        )
        for window in points
    ]


def encoding_sweep(size: int, servers: int, most_rounds: int | None = None) -> list[Scenario]:
    """
    Return the encoding sweep: a scenario for each pair of ``ENCODINGS`` with at most one share per server.
    """
    return [
        Scenario(f"{k} of {n}", ENCODING, (size,), encoding=(k, n), most_rounds=most_rounds)
        for k, n in ENCODINGS
        if n <= servers
    ]


def sweep_bytes(link: EmulatedLink | None, params: Params) -> int:
    """
    Return the size of the window sweep's file, within limits: its transfer takes about ``SWEEP_S`` at this
    link's rate, or ten round trips if these take longer.
    """
    if link is None or link.up_bytes_per_s is None:
        return _SWEEP_UNLIMITED
    seconds = max(SWEEP_S, 10 * link.rtt_s)
    size = link.up_bytes_per_s * seconds * params.required_shares / params.total_shares
    rounded = int(float(f"{size:.0e}"))
    return min(max(rounded, SWEEP_LEAST), SWEEP_MOST)


def transfers_s(
    scenario: Scenario, link: EmulatedLink | None, params: Params
) -> tuple[float, float]:
    """
    Return the least seconds for storing and for reading, counting only the link: its round trips and rates.
    """
    if link is None:
        return 0.0, 0.0
    trips_s = link.rtt_s * (1 if scenario.at_once else scenario.files)
    up_s, down_s = trips_s, trips_s
    if link.up_bytes_per_s:
        up_s += scenario.wire_bytes(UP, params) / link.up_bytes_per_s
    if link.down_bytes_per_s:
        down_s += scenario.wire_bytes(DOWN, params) / link.down_bytes_per_s
    return up_s, down_s if scenario.fetches else 0.0


def in_time(scenario: Scenario, link: EmulatedLink | None, params: Params) -> Scenario:
    """Return the scenario, limited to the rounds that fit in ``ALL_ROUNDS_S``, but at least two."""
    round_s = sum(transfers_s(scenario, link, params))
    if not round_s:
        return scenario
    rounds = max(2, int(ALL_ROUNDS_S / round_s))
    if scenario.most_rounds is not None:
        rounds = min(rounds, scenario.most_rounds)
    return attrs.evolve(scenario, most_rounds=rounds)


def full(link: EmulatedLink | None, params: Params, servers: int) -> list[Scenario]:
    """Return all scenarios, in each group the shorter ones first."""
    scenarios = [
        Scenario(STARTUP, SCENARIO, (200,), fresh=True),
        series(1, 200),
        series(10, 200),
        series(100, 200, most_rounds=3),
        large(MB),
        large(10 * MB),
        Scenario("100x 200B at once", SCENARIO, (200,) * 100, at_once=True),
        mixed(),
        large(100 * MB, most_rounds=3),
        *window_sweep(sweep_bytes(link, params), most_rounds=3),
        *encoding_sweep(MB, servers, most_rounds=3),
        Scenario(COMMAND, COLD_START, (200,), fresh=True),
    ]
    return [in_time(each, link, params) for each in scenarios]


def quick(params: Params, servers: int) -> list[Scenario]:
    """Return a small scenario of each kind, to show that everything works."""
    return [
        Scenario(STARTUP, SCENARIO, (200,), fresh=True),
        series(1, 200),
        series(10, 200),
        large(MB),
        Scenario("10x 200B at once", SCENARIO, (200,) * 10, at_once=True),
        *window_sweep(100 * KB, (10 * KB, MB)),
        *encoding_sweep(10 * KB, servers)[:1],
        Scenario(COMMAND, COLD_START, (200,), fresh=True),
    ]


def choose(scenarios: Sequence[Scenario], wanted: Sequence[str]) -> list[Scenario]:
    """
    Return the scenarios with a wanted name or group; all scenarios if ``wanted`` is empty.

    Args:
        wanted: titles or groups, in upper or lower case. Any other text selects the titles that contain it.

    Raises:
        UsageError: a wanted text matches no scenario.
    """
    if not wanted:
        return list(scenarios)
    chosen: list[Scenario] = []
    for text in wanted:
        word = text.casefold()
        exact = [
            each for each in scenarios if word in (each.title.casefold(), each.group.casefold())
        ]
        found = exact or [each for each in scenarios if word in each.title.casefold()]
        if not found:
            titles = ", ".join(each.title for each in scenarios if each.group != WINDOW)
            raise UsageError(f"there is no scenario {text!r}; choose from {titles}, or {WINDOW}")
        chosen += found
    return [each for each in scenarios if each in chosen]


def split_by_duration(
    scenarios: Iterable[Scenario], link: EmulatedLink | None, params: Params
) -> tuple[list[Scenario], list[Scenario]]:
    """
    Return two lists: the scenarios whose transfers take at most ``MAX_TRANSFER_S`` on this link, and the
    others.
    """
    within: list[Scenario] = []
    beyond: list[Scenario] = []
    for each in scenarios:
        longest_s = max(transfers_s(each, link, params))
        (within if longest_s <= MAX_TRANSFER_S else beyond).append(each)
    return within, beyond

"""Runs the speed test: rounds of scenarios in random order, with raw TCP measured before and after."""

from __future__ import annotations

import gc
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

import attrs

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import GridError
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.reactor.trace import Tracer
from pipegrid.speedtest.benchmark_clients import Comparing, Session, new_files
from pipegrid.speedtest.child_processes import environment, in_thread
from pipegrid.speedtest.raw_tcp_baseline import Effort, join, measure_baselines, together
from pipegrid.speedtest.run_results import (
    COLD_START,
    DOWN,
    UP,
    Baseline,
    Measurement,
    Parameters,
    RoundTrip,
    Run,
    Timeline,
    commit,
    machine,
    versions,
)
from pipegrid.speedtest.scenarios import AUTO, Scenario
from pipegrid.speedtest.targets import FileTarget, check_space
from pipegrid.speedtest.traffic_recorder import Recorder, RecordingReactor, from_spans

Say = Callable[[str], object]

DEFAULT_ROUNDS = 5
COMMAND_TIMEOUT_S = 120.0
_WARM_BYTES = 200
TIMELINES = 5
"""How many uploads are recorded; the report shows one of them."""


@attrs.frozen
class Settings:
    """
    The settings of a run.

    Attributes:
        rounds: the number of samples of each scenario without its own limit.
        seed: of the files' contents, and of the order of scenarios in each round.
        window_bytes: the window of the pipelines; None is ``auto``.
        pings: how often each server is pinged in each round.
        effort: how much raw TCP is measured.
    """

    rounds: int = DEFAULT_ROUNDS
    seed: int = 0
    window_bytes: int | None = None
    pings: int = 3
    effort: Effort = attrs.field(factory=lambda: Effort(rounds=2))


@as_deferred
async def run(
    reactor: Any,
    target: FileTarget,
    choose: Callable[[FileTarget], Sequence[Scenario]],
    settings: Settings,
    say: Say,
) -> Run:
    """
    Start a target, measure it, and stop it.

    Args:
        choose: returns the scenarios for the target, which has started.
        say: called with the progress, a line at a time.

    Raises (through the Deferred):
        UsageError: there is too little space, or nothing to measure.
        PipegridError: the target is unreachable, rejects a request, or returns wrong bytes.
    """
    began, when = time.monotonic(), datetime.now(timezone.utc)
    try:
        await target.start()
        say(f"measuring {target}")
        scenarios = choose(target)
        await check_space(
            target, sum(each.stored_bytes(target.params, settings.rounds) for each in scenarios)
        )
        before = await _baselines(reactor, target, settings.effort, say)
        rounds = Rounds(reactor, target, scenarios, settings, say)
        await rounds.do()
        timeline = await record(reactor, target, rounds.round_trips)
        after = await _baselines(reactor, target, settings.effort, say)
    finally:
        await target.stop()
    parameters = Parameters(
        target.kind,
        target.transport,
        target.servers,
        target.params.required_shares,
        target.happy,
        target.params.total_shares,
        settings.rounds,
        settings.seed,
        AUTO if settings.window_bytes is None else str(settings.window_bytes),
        target.durability,
        target.link,
    )
    return Run(
        when=when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        took_s=time.monotonic() - began,
        commit=commit(),
        versions=versions(),
        machine=machine(),
        parameters=parameters,
        round_trips=tuple(rounds.round_trips),
        baselines=join(before, after),
        measurements=tuple(rounds.measurements),
        timeline=timeline,
    )


async def _baselines(reactor: Any, target: FileTarget, effort: Effort, say: Say) -> list[Baseline]:
    if not target.responders:
        return []
    say("measuring raw TCP on the same path")
    return await measure_baselines(reactor, target.responders, effort)


class Rounds:
    """
    The rounds, and the measurements made so far.

    Every round includes all scenarios that have not reached their own limit of rounds, so that a disturbance
    of the machine affects all of them (A B A B, not A A B B). The order is random, so that no scenario always
    follows the same other one. Files are new in every round, and compared when they are read back.
    Connections are already open, since a small file is stored and read first, except in scenarios that
    measure connecting. Raw TCP is measured on the same path before and after, round trips in every round.

    Attributes:
        round_trips: of each server, over all rounds.
    """

    def __init__(
        self,
        reactor: Any,
        target: FileTarget,
        scenarios: Sequence[Scenario],
        settings: Settings,
        say: Say,
    ) -> None:
        self._reactor = reactor
        self._target = target
        self._scenarios = scenarios
        self._settings = settings
        self._say = say
        self._rng = random.Random(settings.seed)
        self._samples: dict[tuple[Scenario, str], list[float]] = {}
        self.round_trips: list[RoundTrip] = []

    async def do(self) -> None:
        """Warm up, then measure the scenarios of each round, in one session with the target."""
        session = await self._target.open(self._settings.window_bytes)
        try:
            await self._warm(session)
            await self._series(session, _WARM_UP, new_files(self._rng, _WARM_UP.sizes))
            for number in range(self._settings.rounds):
                self._note(await self._target.round_trips(self._settings.pings))
                # The order depends only on the seed and the round.
                rng = random.Random(f"{self._settings.seed}, round {number}")
                for scenario in rng.sample(self._scenarios, len(self._scenarios)):
                    if scenario.counts_in(number):
                        await self._measure(scenario, session, number)
        finally:
            await session.close()

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements, in the order of the scenarios."""
        return [
            self._measurement(scenario, direction, self._samples[scenario, direction])
            for scenario in self._scenarios
            for direction in (UP, DOWN)
            if (scenario, direction) in self._samples
        ]

    def _measurement(self, scenario: Scenario, direction: str, samples: list[float]) -> Measurement:
        required, total = scenario.encoding or (None, None)
        return Measurement(
            scenario.name,
            scenario.group,
            direction,
            scenario.files,
            scenario.mean_bytes,
            scenario.wire_bytes(direction, self._target.params),
            samples,
            scenario.at_once,
            scenario.window_bytes,
            required,
            total,
        )

    def _note(self, trips: Sequence[RoundTrip]) -> None:
        if not self.round_trips:
            self.round_trips = list(trips)
            return
        self.round_trips = [
            attrs.evolve(known, samples_s=known.samples_s + new.samples_s)
            for known, new in zip(self.round_trips, trips, strict=True)
        ]

    async def _measure(self, scenario: Scenario, session: Session, number: int) -> None:
        files = new_files(self._rng, scenario.sizes)
        gc.collect()  # so that one scenario's garbage does not slow down another
        if scenario.group == COLD_START:
            times = await in_thread(self._reactor, self._command, files[0])
        elif scenario.fresh or scenario.fixed_window:
            window = scenario.window_bytes if scenario.fixed_window else self._settings.window_bytes
            own = await self._target.open(window)
            try:
                if not scenario.fresh:
                    await self._warm(own)
                times = await self._series(own, scenario, files)
            finally:
                await own.close()
        else:
            await self._warm(session)
            times = await self._series(session, scenario, files)
        for direction, took_s in times.items():
            self._samples.setdefault((scenario, direction), []).append(took_s)
        told = ", ".join(f"{took_s:.3f} {direction}" for direction, took_s in times.items())
        self._say(f"round {number + 1} of {self._settings.rounds}: {scenario.title}: {told}")

    async def _warm(self, session: Session) -> None:
        """Open connections to all servers, since idle connections are closed after a minute."""
        target = self._target
        count = 1 if target.servers <= target.params.total_shares else 3 * target.servers
        files = new_files(self._rng, [_WARM_BYTES] * min(count, 100))
        caps = await together(session.put(file) for file in files)
        for cap, file in zip(caps, files, strict=True):
            await session.get(cap, Comparing(file))

    async def _series(
        self, session: Session, scenario: Scenario, files: Sequence[bytes]
    ) -> dict[str, float]:
        """Store the files and read them back; return the seconds of each direction."""
        params: Params | None = None
        if scenario.encoding is not None or scenario.segment_bytes is not None:
            params = scenario.params(self._target.params)
        began = time.perf_counter()
        if scenario.at_once:
            caps = await together(session.put(file, params) for file in files)
        else:
            caps = [await session.put(file, params) for file in files]
        times = {UP: time.perf_counter() - began}
        if not scenario.fetches:
            return times
        sinks = [Comparing(file) for file in files]
        pairs = list(zip(caps, sinks, strict=True))
        gc.collect()
        began = time.perf_counter()
        if scenario.at_once:
            await together(session.get(*pair) for pair in pairs)
        else:
            for pair in pairs:
                await session.get(*pair)
        times[DOWN] = time.perf_counter() - began
        for sink in sinks:
            sink.check()
        return times

    def _command(self, content: bytes) -> dict[str, float]:
        """Measure the command itself, from the start of its process to its end."""
        with tempfile.TemporaryDirectory() as scratch:
            source, copy = Path(scratch, "file"), Path(scratch, "copy")
            source.write_bytes(content)
            began = time.perf_counter()
            cap = self._pipegrid("put", str(source))
            up_s = time.perf_counter() - began
            began = time.perf_counter()
            self._pipegrid("get", cap, "-o", str(copy))
            down_s = time.perf_counter() - began
            comparing = Comparing(content)
            comparing.write(copy.read_bytes())
            comparing.check()
        return {UP: up_s, DOWN: down_s}

    def _pipegrid(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pipegrid.cli", "-q", "-d", str(self._target.directory)]
        done = subprocess.run(
            [*command, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2].removeprefix("pipegrid: ")
            raise GridError(f"'pipegrid {arguments[0]}' ended with {done.returncode}: {said}")
        return done.stdout.strip()


_WARM_UP = Scenario("warm-up", "scenario", (10**6,))


async def record(
    reactor: Any, target: FileTarget, round_trips: Sequence[RoundTrip]
) -> Timeline | None:
    """
    Record uploads of a small file, and return the upload with the median time.

    Returns None if the target hides its servers, or no round trips were measured.
    """
    if not target.adjustable or not round_trips:
        return None
    recorder = Recorder(time.perf_counter)
    zero = reactor.seconds()
    tracer = None if target.names else Tracer(reactor.seconds)
    watching: Any = RecordingReactor(reactor, recorder, target.names) if target.names else reactor
    session = await target.open(reactor=watching, tracer=tracer)
    try:
        warm, *files = new_files(random.Random(), [_WARM_BYTES] * (1 + TIMELINES))
        await session.put(warm)
        gc.collect()
        uploads = []
        for file in files:
            recorder.start()
            since_us = (reactor.seconds() - zero) * 1e6
            began = time.perf_counter()
            await session.put(file)
            took_s = time.perf_counter() - began
            uploads.append((took_s, recorder.stop(), since_us))
    finally:
        await session.close()
    took_s, bursts, since_us = sorted(uploads, key=itemgetter(0))[len(uploads) // 2]
    if tracer is not None:  # for Foolscap, the bursts come from the trace
        bursts = from_spans(tracer.events(), since_us, since_us + took_s * 1e6)
    rtt_s = statistics.fmean(each.average_s for each in round_trips)
    return Timeline("1x 200B", rtt_s, took_s, bursts, len(uploads))

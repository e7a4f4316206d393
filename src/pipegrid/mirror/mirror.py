"""
``Mirror``: brings a directory up to date from several mirrors at once.

The way of a file: list or index -> ``Wanted`` -> is it there already? (a thread) -> ``Plan`` -> a
``Source``'s connection -> ``Sink`` (hash, disk, name; the same thread). What happens is told to the plan,
and the sources ask it what to do next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory

from pipegrid.disk.commit import Policy
from pipegrid.errors import PipegridError, UsageError
from pipegrid.http11 import StandardEndpoints
from pipegrid.http11.endpoints import tunnelled
from pipegrid.mirror.address import Address, parse_url, through
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.plan import Errand, Plan
from pipegrid.mirror.report import Report
from pipegrid.mirror.sink import Sink
from pipegrid.mirror.small import SmallFiles
from pipegrid.mirror.source import CONNECTIONS, Source
from pipegrid.mirror.wanted import BadEntry, Wanted, shown, wanted
from pipegrid.mirror.watch import Pace, Standing, has_stalled, theft
from pipegrid.reactor.workers import CpuWorkers, Workers

Entry = Wanted | tuple[str, int | None, Mapping[str, bytes | str]]
"""A file that the mirror is to hold: path, size in bytes, hashes by name."""

P = ParamSpec("P")
T = TypeVar("T")

LOOKED_AT_ONCE = 256
WATCH_S = 0.25
AHEAD_S = 0.05
"""What a limited rate may be ahead of itself before reading pauses."""


class Mirror:
    """
    A directory, and the mirrors that it is brought up to date from.

    Args:
        urls: of the mirrors; files are below them.
        destination: made if it is not there; locked until ``close``.
        durability: as of storage servers (``disk.commit``).
        connections: to each mirror at most.
        endpoints: how to connect; None: TCP, and TLS with the platform's authorities.
        paranoid: hash what is there, whatever is known of it.
        sample: hash this share of what is there, drawn at random; 0.0 to 1.0.
        limit_bytes_per_s: from all mirrors together; None: no limit.
        progress: called a few times a second with the report as it stands.
        dry_run: count what would be fetched, and fetch nothing.
        seed: of what is drawn for the sample.
        workers: where the disk is written, one job after the other; None: a thread of its own.
        environment: names proxies (``http11.proxies``); None: there are none.

    Raises:
        UsageError: a URL or a number makes no sense.
        MirrorError: the destination cannot be used, or another process mirrors to it.
    """

    def __init__(
        self,
        reactor: Any,
        urls: Sequence[str],
        destination: str,
        *,
        durability: Policy = "batch",
        connections: int = CONNECTIONS,
        endpoints: IAgentEndpointFactory | None = None,
        paranoid: bool = False,
        sample: float = 0.0,
        limit_bytes_per_s: float | None = None,
        progress: Callable[[Report], None] | None = None,
        dry_run: bool = False,
        seed: int | None = None,
        workers: CpuWorkers | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if not 1 <= connections <= 64:
            raise UsageError(f"{connections} connections are not possible; give 1 to 64")
        if not 0.0 <= sample <= 1.0:
            raise UsageError(f"a sample of {sample} is not possible; give 0 to 1")
        if limit_bytes_per_s is not None and not limit_bytes_per_s > 0:
            raise UsageError(f"a limit of {limit_bytes_per_s} bytes a second lets nothing pass")
        self._addresses = [through(parse_url(url), environment or {}) for url in urls]
        self._reactor = reactor
        self._destination = Destination(destination)
        self._workers = workers or Workers(reactor, threads=1, waiting_limit=1 << 16)
        self._durability = durability
        self._connections = connections
        self._endpoints: Any = endpoints or StandardEndpoints(reactor)
        self._paranoid = paranoid
        self._sample = sample
        self._limit = limit_bytes_per_s
        self._progress = progress
        self._dry_run = dry_run
        self._random = random.Random(seed)
        self._running: _Sync | None = None

    @property
    def count(self) -> int:
        """How many mirrors there are."""
        return len(self._addresses)

    def url(self, number: int) -> str:
        """Return that of a mirror."""
        return self._addresses[number].url

    def small_files(self, number: int) -> SmallFiles:
        """Return what asks one mirror for files whose hash is not known; to be closed."""
        return SmallFiles(
            self._reactor, self._addresses[number], self._connector(self._addresses[number])
        )

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call a function in the thread that has the destination."""
        return self._workers.run(function, *args, **kwargs)

    def sync(
        self, files: Iterable[Entry], *, staged: bool = False, always: bool = False
    ) -> Deferred[Report]:
        """
        Fetch what is not there, or not right; fires when all is there or has failed.

        Args:
            files: read while the first of them are being fetched.
            staged: they are not to be seen before ``release``; for indexes, which come last.
            always: even if this is a dry run.

        Cancelling it ends all connections; what has come is kept for the next run.

        Raises (through the Deferred):
            BadEntry: an entry is not one that a mirror can hold; nothing of it or behind it is fetched.
            MirrorError: the destination can take nothing any more.
            UsageError: it is going on already.
        """
        dry_run = self._dry_run and not always
        return Deferred.fromCoroutine(self._sync(files, staged, dry_run))

    async def _sync(self, files: Iterable[Entry], staged: bool, dry_run: bool) -> Report:
        if self._running is not None:
            raise UsageError("this mirror is being brought up to date already; wait for that")
        if not self._addresses:
            raise UsageError("a mirror needs at least one URL to mirror from")
        run = self._running = _Sync(
            self._reactor,
            self._addresses,
            self._destination,
            self._workers,
            self._options(staged, dry_run),
        )
        try:
            return await run.run(files)
        finally:
            self._running = None
            run.close()

    def verify(self) -> Deferred[Report]:
        """
        Look whether all that the last complete run wanted is there and right; asks nobody.

        Files that are known to be good cost a look each, unless the mirror is ``paranoid`` or draws them as a
        ``sample``. The report's ``failed`` names what is missing or wrong.

        Raises (through the Deferred):
            MirrorError: no run to this destination was complete.
        """
        return Deferred.fromCoroutine(self._verify())

    async def _verify(self) -> Report:
        report = Report()
        began_s = self._reactor.seconds()
        entries = self._destination.manifest()

        def look() -> list[tuple[Wanted, str | None]]:
            return [(each, self._look_at(each)) for each in islice(entries, LOOKED_AT_ONCE)]

        while found := await self._workers.run(look):
            for each, wrong in found:
                report.wanted_files += 1
                report.wanted_bytes += each.size or 0
                if wrong is None:
                    report.present_files += 1
                    report.present_bytes += each.size or 0
                else:
                    report.fail(each.path, wrong)
            report.elapsed_s = self._reactor.seconds() - began_s
            if self._progress is not None:
                self._progress(report)
        return report

    def _look_at(self, each: Wanted) -> str | None:
        """In the thread: return what is wrong with a file, None if nothing is."""
        doubted = self._paranoid or (self._sample > 0 and self._random.random() < self._sample)
        try:
            right = self._destination.is_there(each, doubted)
        except BadEntry as error:
            return str(error)
        return None if right else "it is missing, or has changed"

    def complete(self, entries: Iterable[Wanted]) -> Deferred[None]:
        """Note that this is what the destination holds; see ``verify`` and ``delete_others``."""
        return self._workers.run(self._destination.write_manifest, entries)

    def delete_others(self, paths: Iterable[str], dry_run: bool = False) -> Deferred[list[str]]:
        """
        Remove all files but those of these paths; fires with what was removed.

        Args:
            dry_run: only tell.
        """
        kept = frozenset(paths)

        def delete() -> list[str]:
            others = list(self._destination.others(kept))
            for path in () if dry_run else others:
                self._destination.delete(path)
            return others

        return self._workers.run(delete)

    @property
    def destination(self) -> Destination:
        """Where it is kept; to be used in its thread only, see ``run``."""
        return self._destination

    def _connector(self, address: Address) -> Callable[[], Any]:
        uri = URI.fromBytes(address.url.encode("ascii", "replace"))
        proxy = address.proxy
        if proxy is None:
            return lambda: self._endpoints.endpointForURI(uri)
        via = URI.fromBytes(proxy.url.encode("ascii"))
        if address.scheme == "http":
            return lambda: self._endpoints.endpointForURI(via)
        return lambda: tunnelled(self._endpoints.endpointForURI(via), uri, proxy)

    def _options(self, staged: bool, dry_run: bool) -> _Options:
        return _Options(
            policy=self._durability,
            connections=self._connections,
            connect=self._connector,
            paranoid=self._paranoid,
            sample=self._sample,
            limit=self._limit,
            progress=self._progress,
            dry_run=dry_run,
            staged=staged,
            random=self._random,
        )

    def close(self) -> Deferred[None]:
        """Let go of the destination; fires when nothing is written any more."""
        if self._running is not None:
            self._running.close()
        done = self._workers.stop()

        def stopped(_: None) -> None:
            self._destination.close()

        return done.addCallback(stopped)


@attrs.frozen
class _Options:
    policy: Policy
    connections: int
    connect: Callable[[Address], Callable[[], Any]]
    paranoid: bool
    sample: float
    limit: float | None
    progress: Callable[[Report], None] | None
    dry_run: bool
    staged: bool
    random: random.Random


class _Sync:
    """One bringing up to date."""

    def __init__(
        self,
        reactor: Any,
        addresses: Sequence[Any],
        destination: Destination,
        workers: CpuWorkers,
        options: _Options,
    ) -> None:
        self._clock = reactor
        self._destination = destination
        self._workers = workers
        self._options = options
        self._plan = Plan(len(addresses))
        self._sink = Sink(
            destination,
            workers,
            options.policy,
            self._full,
            self._broken,
            None if options.limit is None else self._throttle,
            options.staged,
        )
        self._sources = [
            Source(
                number,
                address,
                self._plan,
                self._sink,
                reactor,
                options.connect(address),
                self,
                options.connections,
            )
            for number, address in enumerate(addresses)
        ]
        self._paces = [Pace() for _ in addresses]
        self._report = Report(tallies=[source.tally for source in self._sources])
        self._began_s = reactor.seconds()
        self._all_read = False
        self._would = self._would_bytes = 0
        self._closed = False
        self._sink_is_full = False
        self._allowed_until_s = self._began_s
        self._throttled: IDelayedCall | None = None
        self._watcher: IDelayedCall | None = None
        self._ended: Deferred[None] = Deferred()

    async def run(self, files: Iterable[Entry]) -> Report:
        """See ``Mirror.sync``."""
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        leftovers = await self._workers.run(self._destination.leftovers)
        entries = self._checked(files)
        while chunk := list(islice(entries, LOOKED_AT_ONCE)):
            missing = await self._workers.run(self._look, chunk, leftovers)
            self._count(chunk, missing)
            if self._options.dry_run:
                self._would += len(missing)
                self._would_bytes += sum(each.size or 0 for each in missing)
                continue
            for each in missing:
                self._plan.add(each)
            self._work()
            if self._ended.called:
                break
        self._all_read = True
        self._look_finished()
        await self._ended
        await self._sink.flush()
        if not (self._options.dry_run or self._options.staged):  # what indexes name comes later
            await self._workers.run(self._drop_leftovers, leftovers)
        self._bring_up_to_date()
        return self._report

    def close(self) -> None:
        """End everything."""
        self._closed = True
        self._ended.addErrback(lambda _: None)  # whoever wanted to know has been told
        call, self._watcher = self._watcher, None
        if call is not None:
            call.cancel()
        throttled, self._throttled = self._throttled, None
        if throttled is not None:
            throttled.cancel()
        for source in self._sources:
            source.close()

    # What is wanted, and what is there.

    def _checked(self, files: Iterable[Entry]) -> Iterator[Wanted]:
        """Yield each entry once, checked."""
        seen: dict[str, bytes] = {}
        for entry in files:
            each = entry if isinstance(entry, Wanted) else wanted(*entry)
            known = seen.get(each.path)
            if known is None:
                seen[each.path] = each.digest
                yield each
            elif known != each.digest:
                raise BadEntry(
                    f"{shown(each.path)} is named twice, with different hashes; the index is wrong"
                )

    def _look(self, chunk: list[Wanted], leftovers: dict[bytes, str]) -> list[Wanted]:
        """In the thread: return what is not there. What an earlier run left is taken up."""
        missing = []
        options, destination = self._options, self._destination
        for each in chunk:
            doubted = options.paranoid or (
                options.sample > 0 and options.random.random() < options.sample
            )
            if destination.is_there(each, doubted, options.staged):
                continue
            left = None
            if leftovers and not options.dry_run:
                left = leftovers.pop(each.digest, None)
            if left is None or not destination.take_up(left, each, options.staged):
                missing.append(each)
        return missing

    def _drop_leftovers(self, leftovers: dict[bytes, str]) -> None:
        for name in leftovers.values():
            self._destination.discard(name)

    def _count(self, chunk: list[Wanted], missing: list[Wanted]) -> None:
        report = self._report
        report.wanted_files += len(chunk)
        size = sum(each.size or 0 for each in chunk)
        report.wanted_bytes += size
        report.present_files += len(chunk) - len(missing)
        report.present_bytes += size - sum(each.size or 0 for each in missing)

    # What happens.

    def arrived(self, source: Source, errand: Errand, size_bytes: int) -> None:
        """See ``SourceEvents``."""
        if errand.under_way:
            for other in self._sources:
                if errand.under_way >> other.number & 1:
                    other.forget(errand)
        self._look_finished()

    def changed(self) -> None:
        """See ``SourceEvents``."""
        self._work()
        self._look_finished()

    def _full(self, full: bool) -> None:
        self._sink_is_full = full
        self._pause()

    def _pause(self) -> None:
        paused = self._sink_is_full or self._throttled is not None
        for source in self._sources:
            if source.is_paused != paused:
                source.pause(paused)

    def _broken(self, error: PipegridError) -> None:
        if not self._ended.called:
            self._ended.errback(error)

    def _work(self) -> None:
        if not self._closed:
            for source in self._sources:
                source.work()

    def _look_finished(self) -> None:
        if self._all_read and self._plan.is_idle and not self._ended.called:
            self._ended.callback(None)

    # What is watched.

    def _watch(self) -> None:
        self._watcher = self._clock.callLater(WATCH_S, self._watch)
        now_s = self._clock.seconds()
        able = [s for s in self._sources if not (s.is_resting or s.is_given_up)]
        for source, pace in zip(self._sources, self._paces, strict=True):
            owed = source.owed_bytes
            pace.note(now_s, source.asked_bytes - owed, owed > 0 and not source.is_paused)
            if source.is_paused:
                continue
            others = any(other is not source for other in able)
            for connection in list(source.connections):
                idle_s = now_s - source.last_byte_s.get(connection, now_s)
                if connection.lane.written and has_stalled(idle_s, others):
                    source.stalled(connection, f"no byte came for {idle_s:.1f} s")
        if not self._plan.waits and self._all_read:
            self._steal()
        if self._options.progress is not None:
            self._bring_up_to_date()
            self._options.progress(self._report)

    def _steal(self) -> None:
        move = theft(
            [
                Standing(
                    source.number,
                    source.owed_bytes,
                    pace.bytes_per_s,
                    not (source.is_resting or source.is_given_up or source.is_paused),
                )
                for source, pace in zip(self._sources, self._paces, strict=True)
            ]
        )
        if move is None:
            return
        thief, left_bytes = self._sources[move.thief], move.size_bytes
        for errand in reversed(self._sources[move.victim].under_way()):
            if left_bytes <= 0:
                break
            if thief.ask_too(errand):
                left_bytes -= errand.size_bytes

    def _throttle(self, received_bytes: int) -> None:
        """Do not read on before so many bytes may have come."""
        limit = self._options.limit
        assert limit is not None
        now_s = self._clock.seconds()
        due_s = self._allowed_until_s = max(self._allowed_until_s, now_s) + received_bytes / limit
        if self._throttled is None and due_s - now_s > AHEAD_S:
            self._throttled = self._clock.callLater(due_s - now_s, self._unthrottle)
            self._pause()

    def _unthrottle(self) -> None:
        self._throttled = None
        self._pause()

    def _bring_up_to_date(self) -> None:
        report, plan = self._report, self._plan
        report.fetched_files = plan.done_files + self._would
        report.fetched_bytes = plan.done_bytes + self._would_bytes
        report.retries = plan.retries
        report.elapsed_s = self._clock.seconds() - self._began_s
        for errand in plan.failed[report.failed_files :]:
            reasons = errand.reasons or {}
            why = "; ".join(
                f"{self._sources[number].address.url}: {reason}"
                for number, reason in reasons.items()
            )
            report.fail(errand.wanted.path, why or "no mirror could be used")

"""
``pipegrid serve``: a storage server with all that belongs to a process: identity, port, timers, metrics, end.

``StorageNode`` is started and stopped; ``serve`` is one that runs until it is cancelled, ``run`` a whole
process around one. Nothing is configured in more than one way: all settings are ``ServeSettings``.

**The end.** Whoever stops the node has every request that was begun answered, for 10 s at most, then what
waits to become durable made so, then files and locks let go. Unfinished uploads stay, and the next
process resumes them.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from pipegrid.disk.commit import Policy
from pipegrid.disk.durability import Durability
from pipegrid.errors import UsageError
from pipegrid.reactor.monotonic import make_monotonic
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity, supervised
from pipegrid.server.collecting import Collecting
from pipegrid.server.crowd import MAX_CLOSING, MAX_CONNECTIONS, Crowd
from pipegrid.server.foolscap.port import FoolscapPort
from pipegrid.server.front import Front, FrontFactory
from pipegrid.server.gbs.service import GbsService
from pipegrid.server.gbs.site import GbsSite
from pipegrid.server.location import endpoint_text, where
from pipegrid.server.storagelock import lock_storage
from pipegrid.storage.expiry import Expiry
from pipegrid.storage.steadytime import SteadyDate, why_wrong
from pipegrid.storage.store import KEEP_UNFINISHED_S, ShareStore
from pipegrid.wire.furl import Furl

DEFAULT_PORT = "tcp:8098"
DURABILITIES: tuple[Policy, ...] = ("none", "batch", "strict")
HOUSEKEEPING_S = 5 * 60.0
COLLECTION_S = 12 * 3600.0
_SPARE_FILES = 64

log = Logger()


@attrs.frozen(kw_only=True)
class ServeSettings:
    """
    How to serve.

    Attributes:
        directory: the node's: its identity is in ``private``.
        port: a TCP port, or a Twisted endpoint; perhaps several, with commas between.
        location: ``host:port`` where clients find it, perhaps several, with commas between, also as hints of
            Foolscap's (``tcp:host:port``); None: the port's own interface, or the host's name.
        storage: the storage directory; None: ``storage`` in the node's.
        reserved_bytes: room on the disk to leave free.
        keep_unfinished_s: how long after its last write an unfinished upload is kept, unless its room is
            needed.
        read_only: take no shares.
        durability: see ``durability``.
        metrics: a port (on 127.0.0.1) or endpoint for Prometheus, or None.
        expiry: when to remove shares whose leases have all run out; None: never.
        introducers: whom to tell that it is there: names, for the log, and fURLs.
        nickname: what people call the server, once it is announced.
        announce_nurls: announce that it speaks HTTPS; else only that it speaks Foolscap.
        certificates: of grid managers, as they are announced.
        max_connections: at a time; the limit of open files may allow less.
        max_per_address: of these, from one address; None for half of them. See ``crowd``.
    """

    directory: Path
    port: str = DEFAULT_PORT
    location: str | None = None
    storage: Path | None = None
    reserved_bytes: int = 0
    keep_unfinished_s: float = KEEP_UNFINISHED_S
    read_only: bool = False
    durability: Policy = "batch"
    metrics: str | None = None
    expiry: Expiry | None = None
    introducers: Mapping[str, Furl] = attrs.field(factory=dict)
    nickname: str = ""
    announce_nurls: bool = True
    certificates: Sequence[Mapping[str, Any]] = ()
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int | None = None


class StorageNode:
    """
    A storage server that listens. Made by ``start``.

    Attributes:
        nurl: where clients find it; the first, if there are several.
        nurls: all of them.
        furl: where clients find it that speak Foolscap.
        server_id: as introducers know it; empty if it is not announced.
        metrics_port: of the page for Prometheus, or None.
    """

    def __init__(self, reactor: Any, settings: ServeSettings) -> None:
        self.settings = settings
        self.nurl = ""
        self.nurls: list[str] = []
        self.furl = ""
        self.server_id = ""
        self.metrics_port: int | None = None
        self.storage = settings.storage or settings.directory / "storage"
        self._reactor = reactor
        self._workers = Workers(reactor)
        self._collector = Workers(reactor, threads=1)
        self._date = SteadyDate(self.storage)
        self._store = ShareStore(
            self.storage,
            clock=time.time,
            date=self._date,
            reserved_bytes=settings.reserved_bytes,
            keep_unfinished_s=settings.keep_unfinished_s,
            read_only=settings.read_only,
        )
        self._durability = Durability(self._workers, reactor, settings.durability)
        self._server: GbsSite | None = None
        self._foolscap: FoolscapPort | None = None
        self._front: FrontFactory | None = None
        self._ports: list[Any] = []
        self._timers: list[LoopingCall] = []
        self._lock: int | None = None
        self._announcer: Any = None
        self._tub: Any = None
        self._alive: LoopingCall | None = None
        self._serves = False
        self._stopped: Deferred[None] | None = None

    def start(self) -> Deferred[StorageNode]:
        """
        Listen, and begin to keep house; fires with the node itself.

        Raises:
            UsageError: another server has the directory, a port is taken, or a setting makes no sense.
        """
        return Deferred.fromCoroutine(self._start())

    def stop(self) -> Deferred[None]:
        """Stop in good order; stopping again waits for the same end."""
        if self._stopped is None:
            self._stopped = Deferred.fromCoroutine(self._stop())
        waiting: Deferred[None] = Deferred()

        def gone(result: Any) -> Any:
            waiting.callback(None)
            return result

        self._stopped.addBoth(gone)
        return waiting

    async def _start(self) -> StorageNode:
        self._lock = lock_storage(self.storage, self.settings.read_only)
        # Without the lock nothing may be done that is for one server alone: count what is promised, remove.
        alone = self._lock is not None
        try:
            left = self._store.adopt_leftovers() if alone else 0
            if left:
                log.info("{count} unfinished uploads can go on", count=left)
            who = identity.load_or_create(self.settings.directory)
            self._store.slots.node_id = who.tub_id
            service = GbsService(self._store, self._durability, who.swissnum)
            connections = min(self.settings.max_connections, raise_file_limit())
            self._server = GbsSite(service, self._reactor)
            self._foolscap = FoolscapPort(service, who, self._server.note_hostile)
            crowd: Crowd[Front] = Crowd(connections, self.settings.max_per_address, MAX_CLOSING)
            self._front = FrontFactory(
                self._server, who.contexts(), self._reactor, self._foolscap, crowd
            )
            for text in self.settings.port.split(","):
                await self._listen(endpoint_text(text.strip()), self._front)
            hints = where(self.settings.location, self._ports[0].getHost())
            nurls = who.nurls(hints)
            self.nurl, self.nurls = nurls[0], nurls
            furl = self._foolscap.located(hints)
            self.furl = str(furl)
            identity.keep_furl(self.settings.directory, furl)
            if self.settings.metrics is not None:
                from pipegrid.server.metrics import metrics_page

                text = endpoint_text(self.settings.metrics, "127.0.0.1")
                page = metrics_page(self._reactor, self._server, service, self._store)
                metrics = await self._listen(text, page)
                self.metrics_port = getattr(metrics.getHost(), "port", None)
            if self.settings.introducers:
                self._announce(who.tub_id, nurls if self.settings.announce_nurls else [])
        except BaseException:
            await self._stop()
            raise
        if alone:
            self._every(HOUSEKEEPING_S, "unfinished uploads given up", self._store.expire_uploads)
        expiry = self.settings.expiry
        if expiry is not None and alone:
            collect = Collecting(self._store, self.storage, expiry, self._date)
            self._every(COLLECTION_S, "expired shares removed", collect)
        self._alive = supervised.stay_alive(self._reactor)
        self._serves = True
        supervised.notify(supervised.READY)
        log.info(
            "serving {storage} with durability {durability}",
            storage=str(self.storage),
            durability=self.settings.durability,
        )
        wrong = why_wrong(time.time())
        if wrong is not None:
            log.warn("{wrong}", wrong=wrong)
        return self

    async def _listen(self, text: str, factory: Any) -> Any:
        try:
            port = await serverFromString(self._reactor, text).listen(factory)
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError(
                f"{text!r} is no port or endpoint ({str(error).rstrip('.')}); give one such as tcp:8098"
            ) from error
        except Exception as error:  # CannotListenError, for one
            why = str(error).rstrip(".")
            raise UsageError(f"cannot listen on {text}: {why}; choose another port") from error
        self._ports.append(port)
        return port

    def _announce(self, tub_id: bytes, nurls: list[str]) -> None:
        # Foolscap takes long to import.
        from foolscap.api import Referenceable

        from pipegrid.server import announce
        from pipegrid.wire.announcements import sign
        from pipegrid.wire.introducing import LOST_AFTER_S
        from pipegrid.wire.tub import make_tub

        has_shares = any((self.storage / "shares").glob("[a-z2-7][a-z2-7]/*"))
        identity = announce.load_or_create(self.settings.directory, tub_id, has_shares)
        fields = announce.storage_fields(
            identity,
            nickname=self.settings.nickname or socket.gethostname(),
            nurls=nurls,
            furl=self.furl,
            certificates=self.settings.certificates,
        )
        self.server_id = identity.key.server_id
        self._tub = make_tub(LOST_AFTER_S)
        self._tub.startService()
        self._announcer = announce.Announcer(
            self.settings.introducers,
            sign(fields, identity.key),
            self._tub.getReference,
            self._reactor,
            Referenceable,
        )
        self._announcer.start()

    def _every(self, interval_s: float, what: str, work: Callable[[], int]) -> None:
        def again() -> Deferred[None]:
            return self._collector.run(work).addCallbacks(done, failed)

        def done(count: int) -> None:
            if count:
                log.info("{what}: {count}", what=what, count=count)

        def failed(failure: Any) -> None:
            if not failure.check(CancelledError):  # the node is stopping
                log.failure("housekeeping failed", failure)

        timer = LoopingCall(again)
        timer.clock = self._reactor
        timer.start(interval_s)
        self._timers.append(timer)

    async def _stop(self) -> None:
        if self._serves:
            supervised.notify(supervised.STOPPING)
        for timer in self._timers:
            if timer.running:
                timer.stop()
        if self._announcer is not None:
            self._announcer.stop()
            await self._tub.stopService()
        for port in self._ports:
            await port.stopListening()
        if self._server is not None:
            await self._server.stop()
        await self._durability.flush()
        if self._alive is not None:
            self._alive.stop()
        if self._foolscap is not None:
            await self._foolscap.stop()
        if self._front is not None:
            await self._front.stop()
        await self._collector.stop()
        await self._workers.stop()
        self._store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._serves:  # else it is the end of a start that failed, which has its own message
            log.info("stopped serving {storage}", storage=str(self.storage))


def start(reactor: Any, settings: ServeSettings) -> Deferred[StorageNode]:
    """Start a storage server; fires when it listens. See ``StorageNode``."""
    return StorageNode(reactor, settings).start()


async def serve(
    reactor: Any, settings: ServeSettings, announce: Callable[[StorageNode], None]
) -> None:
    """
    Be a storage server until cancelled, and then stop in good order.

    Args:
        announce: called when it listens.

    Raises:
        UsageError: it cannot listen, or have its directory.
    """
    node = await StorageNode(reactor, settings).start()
    try:
        announce(node)
        await Deferred()
    except CancelledError:
        pass
    finally:
        await node.stop()


def run(reactor: Any, settings: ServeSettings, say: Callable[[str], None]) -> int:
    """
    Be a storage server until the process is told to end; returns the exit status.

    Args:
        reactor: not running yet; its handlers of SIGINT and SIGTERM stop the node in good order.
        say: is given the NURL, then the fURL, when the server listens, or one sentence why it does not.
    """
    supervised.end_without_memory()
    make_monotonic(reactor)
    node = StorageNode(reactor, settings)
    failures: list[BaseException] = []

    def started(node: StorageNode) -> None:
        reactor.addSystemEventTrigger("before", "shutdown", node.stop)
        for text in node.nurls:
            say(text)
        say(node.furl)

    def failed(failure: Any) -> None:
        failures.append(failure.value)
        if isinstance(failure.value, UsageError):
            say(str(failure.value))
        else:
            say(failure.getTraceback())
        reactor.stop()

    reactor.callWhenRunning(lambda: node.start().addCallbacks(started, failed))
    reactor.run()
    return 1 if failures else 0


def raise_file_limit() -> int:
    """Allow as many open files as may be; returns how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    # Beside its connection a client may have one share open; so may every waiting commit.
    return max(16, soft // 2 - 512 - _SPARE_FILES) if soft > 2048 else max(16, soft // 4)

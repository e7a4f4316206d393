"""Storage server process: settings, start, stop, timers."""

from __future__ import annotations

import errno
import os
import re
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

from pipegrid.disk import files as disk
from pipegrid.disk.commit import Policy
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.disk.private_output import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.reactor.process_settings import make_monotonic
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity, systemd
from pipegrid.server.foolscap.port import FoolscapPort
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.service import GbsService
from pipegrid.server.listener import (
    MAX_CLOSING,
    MAX_CONNECTIONS,
    ConnectionLimits,
    PortListener,
    ProtocolDetector,
)
from pipegrid.storage.garbage_collector import NonDecreasingDate, look, why_wrong
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.store import KEEP_UNFINISHED_S, ShareStore, StoreSettings
from pipegrid.wire.server_address import Furl

# Where a server listens, and where clients are told to look: as texts of people, and as hints of fURLs.

_LOCATION = re.compile(
    r"(?:(?P<how>tcp|tor|i2p):)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z"
)


def endpoint_text(text: str, interface: str = "") -> str:
    """Return an endpoint's description; a bare number is a TCP port."""
    if not (text.isascii() and text.isdigit()):
        return text
    return f"tcp:{text}:interface={interface}" if interface else f"tcp:{text}"


def where(location: str | None, host: Any) -> tuple[str, ...]:
    """
    Return where clients are told to look, as Foolscap's hints; one at least is ``tcp:`` or ``tor:``.

    Args:
        location: as in ``ServeSettings``.
        host: what the first port says of itself.

    Raises:
        UsageError: the location makes no sense.
    """
    if location is None:
        name = str(getattr(host, "host", ""))
        port = int(getattr(host, "port", 0))
        if not port:  # a socket in the file system, behind something that clients reach
            raise UsageError(
                "no client can find a server that listens on no TCP port; give HOST:PORT with --location"
            )
        if name in ("", "0.0.0.0", "::"):
            name = socket.gethostname()
        return (_hint(name, port),)
    hints = []
    for text in location.split(","):
        match = _LOCATION.match(text.strip())
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise UsageError(
                f"the location {text.strip()!r} is not of the form HOST:PORT; correct it"
            )
        host_name = match["host"].removeprefix("[").removesuffix("]")
        hints.append(_hint(host_name, int(match["port"]), match["how"] or "tcp"))
    if not any(hint.startswith(("tcp:", "tor:")) for hint in hints):
        raise UsageError(f"the location {location!r} leads to no TCP port; add one, as HOST:PORT")
    return tuple(hints)


def _hint(host: str, port: int, how: str = "tcp") -> str:
    return f"{how}:[{host}]:{port}" if ":" in host else f"{how}:{host}:{port}"


# Removing shares whose leases have run out, from time to time, where the clock can be believed.

log = Logger()


class LeaseCollector:
    """
    Args:
        storage: the directory, for the note of when it was looked.
        expiry: what is removed. If all leases end that were not renewed since a day, no clock is asked.
        date: by which leases are made; told what each look believes.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        store: ShareStore,
        storage: Path,
        expiry: Expiry,
        date: NonDecreasingDate,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._storage = storage
        self._expiry = expiry
        self._date = date
        self._clock = clock

    def __call__(self) -> int:
        """
        Remove what is to be; returns how many shares. It may take long; call it in a thread.
        """
        now = self._clock()  # once: what is believed is no later reading
        if self._expiry.renewed_since is None:
            try:
                looks = look(self._storage, now)
            except FileNotFoundError:
                return 0  # there is no storage directory, and so no share
            except OSError as error:
                log.warn(
                    "leases that have run out are kept: {storage} cannot record when they were checked "
                    "({reason}); make it writable",
                    storage=str(self._storage),
                    reason=error.strerror or str(error),
                )
                return 0
            self._date.looked(looks)
            if looks.held_s:
                log.info(
                    "leases that have run out are kept for {days:.1f} more days: this server has not "
                    "checked them regularly until now, or its clock was wrong, and clients may renew them",
                    days=looks.held_s / 86400,
                )
                return 0
        return self._store.collect_garbage(self._expiry, now)


# One server has a storage directory: the lock that tells, and who can do without it.

_NOT_TO_BE_WRITTEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def lock_storage(storage: Path, read_only: bool = False) -> int | None:
    """
    Take the storage directory for this process; returns what to close to let it go.

    What the lock guards is what one server alone may do: promise room, adopt unfinished uploads, remove.
    Shares, leases and slots that are changed are locked each by itself, for any number of processes. So
    who takes no shares, and may not write there, need not have the lock, and does none of that.

    Args:
        read_only: where the lock's file cannot be written to, return None.

    Raises:
        UsageError: another server has it, or it cannot be made.
    """
    path = storage / "serve.lock"
    try:
        # Mutable shares hold the secret that changes them, as the format has it: nobody else may read them.
        make_directory(storage, 0o700)
        fd = disk.open_locked(str(path), os.O_RDWR | os.O_CREAT, mode=0o600)
    except disk.CannotLock as error:
        raise UsageError(f"cannot lock {path}: {error.strerror}; choose another disk") from error
    except OSError as error:
        if read_only and error.errno in _NOT_TO_BE_WRITTEN and storage.is_dir():
            log.info("{storage} cannot be written to; it is served as it is", storage=str(storage))
            return None
        raise UsageError(
            f"cannot use the storage directory {storage}: {error.strerror}; choose another"
        ) from error
    if fd is None:
        raise UsageError(
            f"another server is serving {storage}; stop it, or choose another directory"
        )
    return fd


# ``pipegrid serve``: a storage server with all that belongs to a process: identity, port, timers,
# metrics, end.
#
# ``StorageNode`` is started and stopped; ``serve`` is one that runs until it is cancelled, ``run`` a whole
# process around one. Nothing is configured in more than one way: all settings are ``ServeSettings``.
#
# **The end.** Whoever stops the node has every request that was begun answered, for 10 s at most, then what
# waits to become durable made so, then files and locks let go. Unfinished uploads stay, and the next
# process resumes them.

DEFAULT_PORT = "tcp:8098"
DURABILITIES: tuple[Policy, ...] = ("none", "batch", "strict")
HOUSEKEEPING_S = 5 * 60.0
COLLECTION_S = 12 * 3600.0
_SPARE_FILES = 64


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
        self._date = NonDecreasingDate(self.storage)
        self._store = ShareStore(
            self.storage,
            StoreSettings(
                reserved_bytes=settings.reserved_bytes,
                keep_unfinished_s=settings.keep_unfinished_s,
                read_only=settings.read_only,
            ),
            clock=time.time,
            date=self._date,
        )
        self._durability = GroupCommit(self._workers, reactor, settings.durability)
        self._server: GbsSite | None = None
        self._foolscap: FoolscapPort | None = None
        self._front: PortListener | None = None
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
                log.info("{count} unfinished uploads can be resumed", count=left)
            who = identity.load_or_create(self.settings.directory)
            self._store.slots.node_id = who.tub_id
            service = GbsService(self._store, self._durability, who.swissnum)
            connections = min(self.settings.max_connections, raise_file_limit())
            self._server = GbsSite(service, self._reactor)
            self._foolscap = FoolscapPort(service, who, self._server.note_hostile)
            crowd: ConnectionLimits[ProtocolDetector] = ConnectionLimits(
                connections, self.settings.max_per_address, MAX_CLOSING
            )
            self._front = PortListener(
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
            collect = LeaseCollector(self._store, self.storage, expiry, self._date)
            self._every(COLLECTION_S, "expired shares removed", collect)
        self._alive = systemd.stay_alive(self._reactor)
        self._serves = True
        systemd.notify(systemd.READY)
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
                f"{text!r} is not a port or endpoint ({str(error).rstrip('.')}); give one such as tcp:8098"
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
        from pipegrid.wire.foolscap_broker import make_tub
        from pipegrid.wire.introducer_protocol import LOST_AFTER_S

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
            systemd.notify(systemd.STOPPING)
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
    systemd.end_without_memory()
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


# Whether a Tahoe-LAFS node still runs in a directory that PipeGrid is to serve.
#
# A running node keeps ``running.process``: its process id, and when that process was made, in seconds since
# 1970. One that was killed leaves it behind, and by now the id may be another's; so both have to agree.

NAME = "running.process"
TOLERANCE_S = 2.0
_MAX_BYTES = 1000


def refuse_if_running(directory: Path, proc: Path = Path("/proc")) -> None:
    """
    Raise UsageError if a Tahoe-LAFS node runs in the directory, as far as this system tells.

    Args:
        proc: the kernel's file system about processes.
    """
    try:
        pid_text, made_text = read_file(directory / NAME, _MAX_BYTES).split()
        pid, made_s = int(pid_text), float(made_text)
    except (OSError, ValueError):
        return
    began_s = process_began(pid, proc)
    if began_s is not None and abs(began_s - made_s) <= TOLERANCE_S:
        raise UsageError(
            f"the Tahoe-LAFS node of {directory} is still running, as process {pid}; stop it first"
        )


def process_began(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Return when a process was made, in seconds since 1970; None if it is gone, or nobody knows."""
    with suppress(OSError, ValueError, IndexError):
        # The second field is the name in brackets, which may hold anything; the 22nd counts from the boot.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        boot_s = next(
            int(line.split()[1])
            for line in (proc / "stat").read_text("ascii", "replace").splitlines()
            if line.startswith("btime ")
        )
        return boot_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None

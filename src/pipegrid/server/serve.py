"""The process of a storage server: its settings, start, stop, timers and locks."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from pipegrid.core.text import amount
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import syncs_names
from pipegrid.disk.durability import Policy
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.disk.private_files import make_directory
from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS, ConnectionPolicy
from pipegrid.reactor.deferreds import timeout_or
from pipegrid.reactor.process_settings import make_monotonic, wall_time
from pipegrid.reactor.workers import Workers
from pipegrid.server import identity, systemd
from pipegrid.server.foolscap.broker import HeldMemory, MessageLimits
from pipegrid.server.foolscap.port import FoolscapPort
from pipegrid.server.foolscap.remote_objects import FoolscapStorage
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.server.introducer_announcement_file import MembersIntroducer
from pipegrid.server.listener import (
    MAX_CONNECTIONS,
    ConnectionLimits,
    PortListener,
    ProtocolDetector,
)
from pipegrid.server.onion_service import OnionService, OnionSettings, check_onion_port
from pipegrid.server.server_certificates import LOOK_S, CertificateWatch
from pipegrid.server.storage_clients import LOOK_S as CLIENTS_LOOK_S
from pipegrid.server.storage_clients import ClientWatch, NamedClient, read_clients
from pipegrid.storage.lease_check_log import NonDecreasingDate, look, why_wrong
from pipegrid.storage.share_file import Expiry
from pipegrid.storage.share_store import KEEP_UNFINISHED_S, ShareStore, StoreSettings
from pipegrid.storage.space_quota import read_note, remove_note
from pipegrid.wire.announcements import Signed
from pipegrid.wire.server_address import Furl

# The endpoints on which a server listens, and its addresses for clients: as text in settings, and as hints of
# fURLs.

_LOCATION = re.compile(
    r"(?:(?P<how>tcp|tor|i2p):)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z"
)


def endpoint_text(text: str, interface: str = "") -> str:
    """Return the description of an endpoint; a number alone is a TCP port."""
    if not (text.isascii() and text.isdigit()):
        return text
    return f"tcp:{text}:interface={interface}" if interface else f"tcp:{text}"


async def listen(reactor: Any, text: str, factory: Any) -> Any:
    """
    Listen on an endpoint; returns the port.

    Raises:
        UsageError: the text is not an endpoint, or the port cannot be used.
    """
    try:
        return await serverFromString(reactor, text).listen(factory)
    except (ValueError, TypeError, LookupError) as error:
        raise UsageError(
            f"{text!r} is not a port or endpoint ({str(error).rstrip('.')}); give one such as tcp:8098"
        ) from error
    except Exception as error:  # such as CannotListenError
        why = str(error).rstrip(".")
        raise UsageError(f"cannot listen on {text}: {why}; choose another port") from error


def where(location: str | None, host: Any) -> tuple[str, ...]:
    """
    Return the server's addresses for clients, as Foolscap's hints; at least one is ``tcp:`` or ``tor:``.

    Args:
        location: see ``ServeSettings``.
        host: the address of the first port.

    Raises:
        UsageError: the location is malformed, or missing though the server listens on no TCP port.
    """
    if location is None:
        name = str(getattr(host, "host", ""))
        port = int(getattr(host, "port", 0))
        if not port:  # a socket file, for a proxy that clients reach
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


def check_hidden(settings: ServeSettings) -> None:
    """
    If the server's own address must be hidden, check that the addresses for clients do not reveal it.

    Raises:
        UsageError: the addresses reveal it; no location is given, so the server's own address would be used;
            or an onion service's port is open to other machines.
    """
    if not settings.connections.hides_address:
        return
    if settings.onion is not None:
        check_onion_port(settings.port, _is_on_this_machine)
        if settings.location is None:
            return
    hidden = "[node] reveal-IP-address is false, so the location for clients"
    if settings.location is None:
        raise UsageError(
            f"{hidden} must be given, as tor:HOST.onion:PORT; set [node] tub.location, or use 'serve --tor'"
        )
    for text in settings.location.split(","):
        match = _LOCATION.match(text.strip())
        if match is None:
            continue
        how, host = match["how"] or "tcp", match["host"].lower().rstrip(".")
        if how == "tcp" or not host.endswith(".onion" if how == "tor" else ".i2p"):
            raise UsageError(f"{hidden} must not contain {text.strip()!r}; remove that address")


def _is_on_this_machine(port: str) -> bool:
    """Return whether only programs of this machine can connect to a port or endpoint."""
    if port.startswith("unix:"):
        return True
    parts = [part for part in re.split(r"(?<!\\):", port)[1:] if part.startswith("interface=")]
    # Only 127.0.0.1 counts, since Tor connects to this address.
    return bool(parts) and all(
        part in ("interface=127.0.0.1", "interface=localhost") for part in parts
    )


def _hint(host: str, port: int, how: str = "tcp") -> str:
    return f"{how}:[{host}]:{port}" if ":" in host else f"{how}:{host}:{port}"


# Periodic removal of shares with expired leases, if the clock is reliable.

log = Logger()


def collect_expired(
    store: ShareStore,
    storage: Path,
    expiry: Expiry,
    date: NonDecreasingDate,
    clock: Callable[[], float] = wall_time,
) -> int:
    """
    Remove shares whose leases have expired; returns how many, 0 while the clock may be wrong. This may take
    long, so call it in a worker thread.

    Args:
        storage: the storage directory, where each check is recorded.
        expiry: which shares are removed. If it has a date of renewal, the clock need not be reliable.
        date: the start date of leases; gets the record of each check.
        clock: returns the seconds since 1970.
    """
    now = clock()  # the same time for the check and the removal
    if expiry.renewed_since is None:
        try:
            looks = look(storage, now)
        except FileNotFoundError:
            return 0  # without a storage directory there are no shares
        except OSError as error:
            log.warn(
                "expired leases are kept: {storage} cannot record when they were checked "
                "({reason}); make it writable",
                storage=str(storage),
                reason=error.strerror or str(error),
            )
            return 0
        date.looked(looks)
        if looks.held_s:
            log.info(
                "expired leases are kept for {days:.1f} more days: this server has not "
                "checked them regularly until now, or its clock was wrong, and clients may renew them",
                days=looks.held_s / 86400,
            )
            return 0
    return store.collect_garbage(expiry, now)


# The lock of a storage directory, which at most one server holds.

_NOT_TO_BE_WRITTEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def lock_storage(storage: Path, read_only: bool = False) -> int | None:
    """
    Lock the storage directory for this process; closing the returned descriptor releases the lock.

    Only the server that has the lock is allowed to promise space, adopt unfinished uploads, and remove
    shares. Shares, leases and slots have their own locks, for any number of processes. So a server that
    accepts no shares, and has no permission to write to the directory, runs without the lock, and does none
    of these three things.

    Args:
        read_only: the server accepts no shares; if the lock's file cannot be written, return None.

    Raises:
        UsageError: another server has the lock, or the file cannot be created or locked.
    """
    path = storage / "serve.lock"
    try:
        # A file with a mutable share contains the secret that allows changes, so other users must not read
        # it.
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


def lock_node(directory: Path) -> int | None:
    """
    Lock a node's directory, whose key at most one server may use; closing the returned descriptor releases
    the lock.

    Return None if the file system has no locks: unlike the storage lock, this one protects no shares.

    Raises:
        UsageError: another server has the lock, or the key cannot be opened.
    """
    path = directory / "private" / "node.pem"
    # The key may be a link to a file in a directory of secrets, and need not be writable.
    real = os.path.realpath(path)
    try:
        try:
            fd = disk.open_locked(real, os.O_RDWR)
        except OSError as error:
            if error.errno not in _NOT_TO_BE_WRITTEN:
                raise
            fd = disk.open_locked(real, os.O_RDONLY)
    except disk.CannotLock as error:
        log.warn(
            "cannot lock {path} ({reason}): make sure that no second server is started in {directory}",
            path=str(path),
            reason=error.strerror,
            directory=str(directory),
        )
        return None
    except OSError as error:
        raise identity.unusable(error, path) from error
    if fd is None:
        raise UsageError(
            f"another server runs in {directory}; stop it, or give each a directory of its own with -d"
        )
    return fd


def check_storage(directory: Path, storage: Path) -> None:
    """
    If the server has run before, check that the storage directory exists and is not empty; otherwise its disk
    may not be mounted.

    Raises:
        UsageError: the directory is empty or missing, or cannot be read.
    """
    if identity.load_furl(directory) is None:
        return
    try:
        if any(storage.iterdir()):
            return
        what = "is empty"
    except FileNotFoundError:
        what = "does not exist"
    except OSError as error:
        raise UsageError(
            f"cannot use the storage directory {storage}: {error.strerror}; choose another"
        ) from error
    raise UsageError(
        f"the storage directory {storage} {what}, and this server has run before; mount its disk, or run "
        f"'mkdir -p {storage / 'shares'}' to begin without shares"
    )


# ``StorageNode`` is started and stopped; ``serve`` runs a node until it is cancelled, and ``run`` is a whole
# process. When a node stops, it answers the requests that have begun, for at most 10 s, commits shares that
# wait to become durable, and releases files and locks. Unfinished uploads stay for the next process.

DEFAULT_PORT = "tcp:8098"
DURABILITIES: tuple[Policy, ...] = ("none", "batch", "strict")
HOUSEKEEPING_S = 5 * 60.0
COLLECTION_S = 12 * 3600.0
COUNT_WAIT_S = 10.0
"""How long the start waits for counting the shares, if they must be counted."""
_SPARE_FILES = 64
_NO_INTRODUCER = "servers that join later are not introduced to members by this server"


@attrs.frozen(kw_only=True)
class ServeSettings:
    """
    Settings of a server.

    Attributes:
        directory: the node's directory; its identity is in ``private``.
        port: a TCP port, or a Twisted endpoint; several are separated by commas.
        location: ``host:port`` for clients, several separated by commas, also as hints of Foolscap
            (``tcp:host:port``); None: the port's own interface, or the host's name.
        storage: the storage directory; None: ``storage`` in the node's directory.
        reserved_bytes: space on the disk to leave free.
        quota_bytes: the most bytes of all shares and unfinished uploads; 0: no quota.
        keep_unfinished_s: how long after its last write an unfinished upload is kept, unless it is evicted.
        read_only: accept no shares.
        durability: the durability policy.
        metrics: a port (on 127.0.0.1) or endpoint for Prometheus, or None.
        expiry: when to remove shares whose leases have all expired; None: never.
        introducers: the introducers to which the server is announced: names, for the log, and fURLs.
        nickname: the announced name of the server, for people.
        introduces: run an introducer for members invited from the directory, if there are no other
            ``introducers``, or the server has run its own one before.
        announce_nurls: announce the server's HTTPS addresses; if False, only Foolscap.
        certificate_files: certificates of grid managers, in addition to ``certificates/*.cert`` in the
            directory.
        max_connections: the most connections at a time; the limit of open files may allow less.
        max_per_address: the most connections from one address; None for half of ``max_connections``.
        connections: how connections to introducers may be made; and whether the server's own address must be
            hidden.
        onion: the server's onion service, its only address for clients unless ``location`` is set; None: no
            onion service.
    """

    directory: Path
    port: str = DEFAULT_PORT
    location: str | None = None
    storage: Path | None = None
    reserved_bytes: int = 0
    quota_bytes: int = 0
    keep_unfinished_s: float = KEEP_UNFINISHED_S
    read_only: bool = False
    durability: Policy = "batch"
    metrics: str | None = None
    expiry: Expiry | None = None
    introducers: Mapping[str, Furl] = attrs.field(factory=dict)
    nickname: str = ""
    introduces: bool = False
    announce_nurls: bool = True
    certificate_files: Sequence[Path] = ()
    max_connections: int = MAX_CONNECTIONS
    max_per_address: int | None = None
    connections: ConnectionPolicy = DIRECT_CONNECTIONS
    onion: OnionSettings | None = None


class StorageNode:
    """
    A running storage server, made by ``start``.

    Attributes:
        nurl: the server's first address for clients that use HTTPS.
        nurls: all its addresses for clients that use HTTPS.
        furl: the server's address for clients that use Foolscap.
        server_id: the server's id for introducers; empty if it is not announced.
        permutation_seed: the server's announced position on every file's ring; empty if it is not announced.
        listening_port: the first port on which it listens; 0 for a socket file.
        metrics_port: the port of the page for Prometheus, or None.
    """

    def __init__(self, reactor: Any, settings: ServeSettings) -> None:
        self.settings = settings
        self.nurl = ""
        self.nurls: list[str] = []
        self.furl = ""
        self.server_id = ""
        self.permutation_seed = b""
        self.listening_port = 0
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
                quota_bytes=settings.quota_bytes or None,
                keep_unfinished_s=settings.keep_unfinished_s,
                read_only=settings.read_only,
            ),
            clock=wall_time,
            date=self._date,
        )
        self._durability = GroupCommit(self._workers, reactor, settings.durability)
        self._server: GbsSite | None = None
        self._foolscap: FoolscapPort | None = None
        self._front: PortListener | None = None
        self._ports: list[Any] = []
        self._timers: list[LoopingCall] = []
        self._lock: int | None = None
        self._node_lock: int | None = None
        self._clients_watch = ClientWatch(settings.directory)
        self._service: GbsService | None = None
        self._announcer: Any = None
        self._members: MembersIntroducer | None = None
        self._certificates: list[dict[str, str]] = []
        self._onion: OnionService | None = None
        self._tub: Any = None
        self._alive: LoopingCall | None = None
        self._serves = False
        self._stopped: Deferred[None] | None = None

    def start(self) -> Deferred[StorageNode]:
        """
        Listen, and start housekeeping; fires with the node itself.

        Raises:
            UsageError: another server has the directory, a port is in use, or a setting is invalid.
        """
        return Deferred.fromCoroutine(self._start())

    def stop(self) -> Deferred[None]:
        """
        Answer the requests that have begun, make waiting shares durable, and release ports, files and locks.

        A second call waits until the first has ended.
        """
        if self._stopped is None:
            self._stopped = Deferred.fromCoroutine(self._stop())
        waiting: Deferred[None] = Deferred()

        def gone(result: Any) -> Any:
            waiting.callback(None)
            return result

        self._stopped.addBoth(gone)
        return waiting

    async def _start(self) -> StorageNode:
        check_hidden(self.settings)
        check_storage(self.settings.directory, self.storage)
        self._lock = lock_storage(self.storage, self.settings.read_only)
        # A server without the lock must not count promised space, adopt unfinished uploads, or remove shares.
        alone = self._lock is not None
        try:
            self._clients_watch = ClientWatch(self.settings.directory)
            clients = read_clients(self.settings.directory)
            left = self._store.adopt_leftovers() if alone else 0
            if alone:
                self._store.clients.expired_before = self._expired_before
                self._store.clients.set_clients([each.quota for each in clients])
                await self._begin_counting()
            else:
                self._store.ignore_quota()
            if left:
                log.info("{count} unfinished uploads can be resumed", count=left)
            who = identity.load_or_create(self.settings.directory)
            self._node_lock = lock_node(self.settings.directory)
            self._store.slots.node_id = who.tub_id
            service = self._service = self._make_port(who)
            self._admit(clients)
            assert self._foolscap is not None
            assert self._server is not None
            for text in self.settings.port.split(","):
                await self._listen(endpoint_text(text.strip()), self._front)
            self.listening_port = getattr(self._ports[0].getHost(), "port", 0)
            hints = await self._hints()
            nurls = who.nurls(hints)
            self.nurl, self.nurls = nurls[0], nurls
            furl = self._foolscap.located(hints)
            self.furl = str(furl)
            identity.keep_furl(self.settings.directory, furl)
            if self.settings.metrics is not None:
                await self._serve_metrics(self.settings.metrics, self._server, service)
            await self._start_proxy()
            self._start_introducer(who, hints)
            if self.settings.introducers or self._members is not None:
                self._announce(who.tub_id, nurls if self.settings.announce_nurls else [])
        except BaseException:
            await self._stop()
            raise
        if alone:
            self._keep_house()
        self._repeat(CLIENTS_LOOK_S, self._look_for_clients)
        self._alive = systemd.stay_alive(self._reactor)
        self._serves = True
        systemd.notify(systemd.READY)
        log.info(
            "serving {storage} with durability {durability}",
            storage=str(self.storage),
            durability=self.settings.durability,
        )
        self._warn_of_surroundings()
        return self

    def _make_port(self, who: identity.Identity) -> GbsService:
        """Make the objects that serve connections; returns the one that serves the requests of GBS."""
        service = GbsService(self._store, self._durability, who.swissnum)
        self._server = GbsSite(service, self._reactor)
        if self._hosts_introducer():
            self._members = self._make_introducer()
        members = self._members
        self._foolscap = FoolscapPort(
            who,
            FoolscapStorage(service),
            limits=MessageLimits(HeldMemory(service.hold)),
            others=lambda: sum(service.requests.values()),
            note_hostile=self._server.note_hostile,
            more={} if members is None else {members.secret: members.service},
        )
        crowd: ConnectionLimits[ProtocolDetector] = ConnectionLimits(
            min(self.settings.max_connections, raise_file_limit()), self.settings.max_per_address
        )
        self._front = PortListener(
            self._server, who.contexts(), self._reactor, self._foolscap, crowd
        )
        return service

    def _admit(self, clients: Sequence[NamedClient]) -> None:
        """Accept the given named clients, and no others, from now on."""
        assert self._service is not None
        assert self._foolscap is not None
        service = self._service
        service.known.set_clients({each.swissnum: each.number for each in clients})
        self._foolscap.set_clients(
            {each.swissnum: FoolscapStorage(service, each.number) for each in clients}
        )

    def _look_for_clients(self) -> None:
        """If the file of named clients has changed, accept the clients that it has now."""
        try:
            clients = self._clients_watch.look()
        except UsageError as error:
            log.error("the named clients stay as they were: {reason}", reason=str(error))
            return
        if clients is None:
            return
        self._admit(clients)
        if self._lock is not None:
            self._store.clients.set_clients([each.quota for each in clients])
            counting = self._collector.run(self._store.count_usage)
            counting.addErrback(partial(_log_failure, "counting shares failed"))
        log.info("named clients: {count}", count=len(clients))

    def _expired_before(self) -> float:
        """Return the time such that leases that expired earlier do not count for a named client's quota."""
        expiry = self.settings.expiry
        removes = expiry is not None and expiry.immutable and expiry.mutable
        return expiry.threshold(wall_time()) if expiry is not None and removes else 0.0

    def _keep_house(self) -> None:
        """Start the regular jobs that only the server with the storage lock may do."""
        self._every(HOUSEKEEPING_S, "unfinished uploads given up", self._store.expire_uploads)
        self._every(HOUSEKEEPING_S, "shares counted", self._store.count_usage)
        expiry = self.settings.expiry
        if expiry is not None:
            collect = partial(collect_expired, self._store, self.storage, expiry, self._date)
            self._every(COLLECTION_S, "expired shares removed", collect)

    async def _start_proxy(self) -> None:
        """Start the proxy for connections to introducers, if the settings say so."""
        start = self.settings.connections.starting
        if start is not None and self.settings.introducers:
            try:
                await start(self._reactor)
            except ConnectionError as error:
                raise UsageError(str(error)) from None

    def _hosts_introducer(self) -> bool:
        """
        Return whether this server must run an introducer for the invitations from this directory, earlier or
        later ones.
        """
        private = self.settings.directory / "private"
        known = private / identity.MEMBERS_FURL_NAME
        wanted = not self.settings.introducers or known.exists()
        return self.settings.introduces and wanted and os.access(private, os.W_OK)

    # No setting asks for this introducer, so shares are served even if it cannot run.

    def _make_introducer(self) -> MembersIntroducer | None:
        try:
            return MembersIntroducer(self._reactor, self.settings.directory, self._workers)
        except UsageError as error:
            log.warn("{what}: {reason}", what=_NO_INTRODUCER, reason=str(error))
            return None

    def _start_introducer(self, who: identity.Identity, hints: Sequence[str]) -> None:
        try:
            if self._members is not None:
                self._members.start(who, hints)
        except UsageError as error:
            log.warn("{what}: {reason}", what=_NO_INTRODUCER, reason=str(error))

    async def _serve_metrics(self, port: str, site: GbsSite, service: GbsService) -> None:
        from pipegrid.server.metrics import metrics_page

        page = metrics_page(self._reactor, site, service, self._store)
        metrics = await self._listen(endpoint_text(port, "127.0.0.1"), page)
        self.metrics_port = getattr(metrics.getHost(), "port", None)

    async def _begin_counting(self) -> None:
        """
        Learn how much of the quotas is used. If shares must be counted for that, wait up to ``COUNT_WAIT_S``,
        since until then the server refuses some or all new shares.
        """
        usage = self._store.usage
        if usage is None:
            note = read_note(self.storage)
            if note is not None:
                log.warn("there is no quota now; it was {quota}", quota=amount(note.quota_bytes))
            remove_note(self.storage)
        else:
            usage.open()
        if (usage is None or usage.exact) and not self._store.clients.is_due():
            return
        counted: Deferred[None] = Deferred()

        def done(result: Any) -> Any:
            if not counted.called:
                counted.callback(None)
            return result

        counting = self._collector.run(self._store.count_usage)
        counting.addBoth(done).addErrback(partial(_log_failure, "counting shares failed"))
        if not await timeout_or(counted, COUNT_WAIT_S, self._reactor):
            log.info(
                "counting the shares in {storage} for the quota takes a while; {what}",
                storage=str(self.storage),
                what="named clients store nothing before it is done"
                if usage is None
                else "no more than the quota is accepted meanwhile"
                if usage.counted
                else "no new ones are accepted before it is done",
            )

    async def _hints(self) -> tuple[str, ...]:
        """
        Return the addresses for clients; starts the onion service, if the settings have one.

        Raises:
            UsageError: the onion service cannot be started, or the location does not contain its address.
        """
        location = self.settings.location
        if self.settings.onion is None:
            return where(location, self._ports[0].getHost())
        if not self.listening_port:
            raise UsageError(
                "an onion service needs a TCP port; listen on one, not on a socket file"
            )
        self._onion = OnionService(self._reactor, self.settings.onion, self.listening_port)
        await self._onion.start()
        if location is None:
            return (self._onion.hint,)
        hints = where(location, None)
        if self._onion.hint not in hints:
            raise UsageError(
                f"the location {location!r} does not contain the onion service {self._onion.hint}; correct it"
            )
        return hints

    def _warn_of_surroundings(self) -> None:
        """Log problems of the file system and the clock, and certificates that no introducer gets."""
        if not syncs_names(self.storage):
            log.warn(
                "the file system of {storage} cannot sync directories: after a power cut shares may be"
                " missing that were acknowledged",
                storage=str(self.storage),
            )
        if self.settings.certificate_files and not self.server_id:
            log.warn(
                "certificates of grid managers are announced to introducers, and this server has none; name "
                "one with --introducer"
            )
        wrong = why_wrong(time.time())
        if wrong is not None:
            log.warn("{wrong}", wrong=wrong)

    async def _listen(self, text: str, factory: Any) -> Any:
        port = await listen(self._reactor, text, factory)
        self._ports.append(port)
        return port

    def _announce(self, tub_id: bytes, nurls: list[str]) -> None:
        # Imported here since Foolscap is slow to import.
        from pipegrid.server import announce
        from pipegrid.wire.announcements import sign

        has_shares = any((self.storage / "shares").glob("[a-z2-7][a-z2-7]/*"))
        directory = self.settings.directory
        try:
            identity = announce.load_or_create(directory, tub_id, has_shares)
        except UsageError as error:
            if self.settings.introducers:
                raise
            log.warn("{what}: {reason}", what=_NO_INTRODUCER, reason=str(error))
            return
        watch = CertificateWatch(
            self.settings.certificate_files, directory, identity.key.public_text, wall_time
        )

        def signed(
            who: announce.AnnouncedIdentity, certificates: Sequence[Mapping[str, Any]]
        ) -> tuple[bytes, bytes, bytes]:
            hides = self.settings.connections.hides_address or self.settings.onion is not None
            name = self.settings.nickname or ("" if hides else socket.gethostname())
            fields = announce.storage_fields(
                who, nickname=name, nurls=nurls, furl=self.furl, certificates=certificates
            )
            return sign(fields, who.key)

        self._certificates = watch.read()
        self.server_id = identity.key.server_id
        self.permutation_seed = identity.permutation_seed
        announcement = signed(identity, self._certificates)
        if self._members is not None:
            self._members.list_own(announcement)
        if self.settings.introducers:
            self._announce_to_introducers(announcement)

        def announce_again() -> int:
            """Announce the certificates again if they have changed; returns 1 if so, else 0."""
            found = watch.look()
            if found is None or found == self._certificates:
                return 0
            try:
                again = signed(announce.renewed(identity, directory), found)
            except UsageError as error:
                log.warn("changed certificates are not announced yet: {reason}", reason=str(error))
                return 0
            self._certificates = found
            if self._announcer is not None:
                self._reactor.callFromThread(self._announcer.replace, again)
            if self._members is not None:
                self._reactor.callFromThread(self._members.list_own, again)
            return 1

        self._every(LOOK_S, "announcements with other certificates", announce_again)

    def _announce_to_introducers(self, announcement: Signed) -> None:
        # Imported here since Foolscap is slow to import.
        from foolscap.api import Referenceable

        from pipegrid.server import announce
        from pipegrid.wire.foolscap_broker import make_tub
        from pipegrid.wire.introducer_protocol import LOST_AFTER_S

        introducers = {}
        for name, furl in self.settings.introducers.items():
            try:
                introducers[name] = furl.reachable(self.settings.connections)
            except ValueError as error:  # noqa: PERF203  the others may be permitted
                log.warn("introducer {name} is skipped: {error}", name=name, error=str(error))
        self._tub = make_tub(LOST_AFTER_S, self.settings.connections)
        self._tub.startService()
        self._announcer = announce.Announcer(
            introducers,
            announcement,
            self._tub.getReference,
            self._reactor,
            Referenceable,
        )
        self._announcer.start()

    def _every(self, interval_s: float, what: str, work: Callable[[], int]) -> None:
        def again() -> Deferred[None]:
            failed = partial(_log_failure, "housekeeping failed")
            return self._collector.run(work).addCallbacks(done, failed)

        def done(count: int) -> None:
            if count:
                log.info("{what}: {count}", what=what, count=count)

        self._repeat(interval_s, again)

    def _repeat(self, interval_s: float, call: Callable[[], object]) -> None:
        timer = LoopingCall(call)
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
        if self._onion is not None:
            await self._onion.stop()
        for port in self._ports:
            await port.stopListening()
        if self._server is not None:
            await self._server.stop()
        await self._durability.flush()
        if self._alive is not None:
            self._alive.stop()
        if self._foolscap is not None:
            await self._foolscap.stop()
        if self._members is not None:
            await self._members.stop()
        if self._front is not None:
            await self._front.stop()
        self._store.stop_counting()
        await self._collector.stop()
        await self._workers.stop()
        self._store.close()
        for lock in (self._lock, self._node_lock):
            if lock is not None:
                os.close(lock)
        self._lock = self._node_lock = None
        if self._serves:  # a failed start has its own message
            log.info("stopped serving {storage}", storage=str(self.storage))


def _log_failure(what: str, failure: Any) -> None:
    if not failure.check(CancelledError):  # the node is stopping
        log.failure(what, failure)


def start(reactor: Any, settings: ServeSettings) -> Deferred[StorageNode]:
    """Start a storage server; fires when it listens. See ``StorageNode``."""
    return StorageNode(reactor, settings).start()


class ServingNode(Protocol):
    """A node that a process runs, such as a storage server."""

    def start(self) -> Awaitable[object]:
        """Listen. If this fails, release everything that was opened."""

    def stop(self) -> Awaitable[object]:
        """Close all ports and connections, and write the data that the next start needs."""


N = TypeVar("N", bound=ServingNode)


async def until_cancelled(node: N, announce: Callable[[N], Awaitable[None] | None]) -> None:
    """
    Run a node until the caller cancels this coroutine's Deferred, and then stop the node.

    Args:
        announce: called with the node when it listens. An exception of this function stops the node, and is
            raised.

    Raises:
        UsageError: the node cannot listen, or cannot use its directory.
    """
    try:
        await node.start()
    except CancelledError:
        return
    try:
        announcing = announce(node)
        if announcing is not None:
            await announcing
        await Deferred()
    except CancelledError:
        pass
    finally:
        await node.stop()


async def serve(
    reactor: Any,
    settings: ServeSettings,
    announce: Callable[[StorageNode], Awaitable[None] | None],
) -> None:
    """Run a storage server; see ``until_cancelled``."""
    await until_cancelled(StorageNode(reactor, settings), announce)


def run(reactor: Any, settings: ServeSettings, say: Callable[[str], None]) -> int:
    """
    Run a storage server until the process gets a signal; returns the exit status.

    Args:
        reactor: not running yet; its handlers of SIGINT and SIGTERM stop the node.
        say: called with each NURL, then the fURL, when the server listens; or with one text that says why the
            server does not listen.
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
        explains_itself = isinstance(failure.value, UsageError)
        say(str(failure.value) if explains_itself else failure.getTraceback())
        reactor.stop()

    reactor.callWhenRunning(lambda: node.start().addCallbacks(started, failed))
    reactor.run()
    return 1 if failures else 0


def raise_file_limit() -> int:
    """
    Raise the limit of open files as far as allowed; returns the number of connections for which it is enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    # Each client may need two descriptors, for its connection and an open share; each waiting commit needs
    # one.
    return max(16, soft // 2 - 512 - _SPARE_FILES) if soft > 2048 else max(16, soft // 4)

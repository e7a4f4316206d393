"""The public class `Mirror`: a mirror that uses a reactor, and its requests for small files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_args

from cryptography.x509 import load_pem_x509_certificates
from OpenSSL.crypto import FILETYPE_PEM, X509
from twisted.internet.defer import Deferred, TimeoutError, fail
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.ssl import (
    Certificate,
    KeyPair,
    PrivateCertificate,
    optionsForClientTLS,
    trustRootFromCertificates,
)
from twisted.internet.task import deferLater
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory, IPolicyForHTTPS
from zope.interface import implementer

from pipegrid.argument_checks import check_callable, check_kind, check_whole, shown
from pipegrid.disk.durability import Policy
from pipegrid.errors import ServerError, UsageError
from pipegrid.http11 import HostPool, Limits, RawRequest, RawResponse, StandardEndpoints
from pipegrid.http11.endpoints import tunnelled
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.connection_scheduler import SmallRoutes
from pipegrid.mirror.credentials import TlsFiles
from pipegrid.mirror.destination import Destination, ReadOnlyDestination
from pipegrid.mirror.epoll_response_head import BUSY, SmallResponses, may_be
from pipegrid.mirror.epoll_socket_cache import can_use_epoll
from pipegrid.mirror.fetch_run import MirrorRun
from pipegrid.mirror.file_scheduler import Report
from pipegrid.mirror.local_check import MirrorEntry, VerifyPolicy
from pipegrid.mirror.manifest import write_manifest
from pipegrid.mirror.mirror_urls import (
    Address,
    FileRoute,
    HostAccess,
    small_request,
)
from pipegrid.mirror.twisted_driver import CONNECTIONS, SyncOptions, TwistedDriver
from pipegrid.mirror.twisted_file_store import retry_after_s
from pipegrid.mirror.verify import verify
from pipegrid.reactor.deferreds import gather, start_cancellable
from pipegrid.reactor.workers import CpuWorkers, Workers

# Small files with unknown hashes: the release files with which a run begins.

TIMEOUT_S = 20.0
MOST_S = 300.0
"""The time limit for all files of one call; if a mirror exceeds it, the next mirror is used."""

PAUSES_S = (1.0, 5.0)
"""The pauses before an overloaded mirror is asked again, unless it demands longer ones."""


class SmallFiles:
    """
    Fetches small files with unknown hashes from one mirror; must be closed.

    Args:
        serial: send each request only after the previous response.
    """

    def __init__(
        self,
        reactor: Any,
        address: Address,
        connector: Callable[[Address], Callable[[], IStreamClientEndpoint]],
        serial: bool = False,
    ) -> None:
        self._clock = reactor
        self._connector = connector
        self._serial = serial
        self._address = address
        self._routes = SmallRoutes(address)
        self._pools: dict[str, HostPool] = {}

    def _pool(self, address: Address) -> HostPool:
        """Return the pool for a host, which is the mirror itself, or a host that it redirects to."""
        pool = self._pools.get(address.origin)
        if pool is None:
            pool = self._pools[address.origin] = HostPool(
                self._clock,
                self._connector(address),
                address.netloc.decode("ascii"),
                Limits(max_connections=1, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S),
                serial=self._serial,
            )
        return pool

    async def fetch(self, path: str, most_bytes: int) -> bytes | str:
        """
        Return the content of a file; a sentence about the response if the mirror does not give it.

        Raises:
            MirrorError: the mirror does not respond, or the file is too long.
        """
        route = self._routes.first(path)
        while True:
            answer = await self._ask_patiently(route, most_bytes)
            if answer.status == 200:
                self._routes.served(route)
                return answer.body
            places = [value for name, value in answer.header_list if name == b"location"]
            again = self._routes.after(path, route, answer.status, places)
            if isinstance(again, str):
                return again
            route = again

    async def _ask_patiently(self, route: FileRoute, most_bytes: int) -> RawResponse:
        answer = await self._ask(route, most_bytes)
        for pause_s in PAUSES_S:
            if answer.status not in BUSY:
                break
            pause_s = max(pause_s, retry_after_s(answer.header_list))
            await deferLater(self._clock, pause_s)
            answer = await self._ask(route, most_bytes)
        return answer

    async def _ask(self, route: FileRoute, most_bytes: int) -> RawResponse:
        head = small_request(route.address, route.target)
        pool = self._pool(route.address)
        try:
            return await pool.request(RawRequest(head, max_body_bytes=most_bytes))
        except ServerError as error:
            raise MirrorError(f"{route.address.url}: {error}") from error

    async def fetch_all(self, asked: Sequence[tuple[str, int]]) -> SmallResponses:
        """
        Return the files that the mirror gives; ``asked`` has the path and the limit in bytes of each wanted
        file.

        Refusals are no error, but in ``refused`` of the result: many mirrors refuse missing files with a
        status other than 404, and some files may be missing. All files are requested at once, and afterwards
        the connection is closed.

        Raises:
            MirrorError: as for ``fetch``.
        """
        asking = Deferred.fromCoroutine(
            gather([Deferred.fromCoroutine(self.fetch(path, most)) for path, most in asked])
        )
        try:
            answers = await asking.addTimeout(MOST_S, self._clock)
        except TimeoutError:
            raise MirrorError(
                f"{self._address.url}: {asked[0][0]} did not arrive within {MOST_S:.0f} s; use another mirror"
            ) from None
        finally:
            await self.close()
        found = SmallResponses()
        for (path, _), data in zip(asked, answers, strict=True):
            if isinstance(data, str):
                found.refused[path] = data
            else:
                found[path] = data
        if not self._serial and not all(may_be(path, data) for path, data in found.items()):
            # The responses seem confused. No hash would reveal it, so the files are fetched again without
            # pipelining.
            again = SmallFiles(self._clock, self._address, self._connector, serial=True)
            return await again.fetch_all(asked)
        return found

    async def close(self) -> None:
        """Close the connections to the mirror, and wait until they are closed."""
        for pool in self._pools.values():
            await pool.close()


@implementer(IPolicyForHTTPS)
class TlsPolicy:
    """The certificate authorities and the client's certificate of a run, for connections of the reactor."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls

    def creatorForNetloc(self, hostname: bytes, port: int) -> Any:
        """Return the TLS options for a host; see ``IPolicyForHTTPS``."""
        host = hostname.decode("ascii")
        tls = self._tls
        options: dict[str, Any] = {}
        if tls.ca:
            options["trustRoot"] = trustRootFromCertificates(_certificates(tls.ca))
        if tls.is_shown_to(host, port):
            first, *chain = _certificates(tls.certificate)
            key = KeyPair.load(tls.key, FILETYPE_PEM)
            options["clientCertificate"] = PrivateCertificate.fromCertificateAndKeyPair(first, key)
            if chain:
                options["extraCertificateOptions"] = {
                    "extraCertChain": [each.original for each in chain]
                }
        return optionsForClientTLS(host, acceptableProtocols=[b"http/1.1"], **options)


def _certificates(data: bytes) -> list[Certificate]:
    return [Certificate(X509.from_cryptography(each)) for each in load_pem_x509_certificates(data)]


# ``Mirror``: brings a directory up to date from several mirrors at once.
#
# The path of a file: list or index -> ``ArchiveFile`` -> does the file exist already? (in a thread) ->
# ``Scheduler`` -> a connection of a ``MirrorSource`` -> ``ArchiveSink`` (hash, disk, name; in the same
# thread). Events are reported to the scheduler, which decides the next requests.

P = ParamSpec("P")
T = TypeVar("T")


class Mirror:
    """
    A directory, and the mirrors that it is brought up to date from.

    Args:
        urls: of the mirrors; the paths of files are relative to them.
        destination: a path, which is made if it does not exist, and locked until ``close``; or an open
            ``Destination``, which ``close`` closes.
        durability: as for storage servers (``disk.durability``).
        connections: the maximum to each mirror.
        endpoints: how to connect; None: TCP, and TLS with the platform's authorities.
        paranoid: hash existing files even if they are recorded as right.
        sample: hash this share of the existing files, drawn at random; 0.0 to 1.0.
        limit_bytes_per_s: from all mirrors together; None: no limit.
        progress: called with the current report, a few times a second; an exception that it raises ends the
            run.
        dry_run: count what would be fetched, and change nothing.
        seed: for drawing the sample.
        workers: the thread that writes to the disk, one job after the other; None: a new one.
        environment: names proxies (``http11.proxy_settings``); None: there are none.
        access: proxies, credentials and TLS files for all hosts; replaces ``environment``.

    Raises:
        UsageError: a URL or a number is invalid.
        MirrorError: the destination cannot be used, or another process mirrors to it.
    """

    def __init__(
        self,
        reactor: Any,
        urls: Sequence[str],
        destination: str | os.PathLike[str] | Destination,
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
        access: HostAccess | None = None,
    ) -> None:
        _check(urls, destination, durability, connections, sample, limit_bytes_per_s)
        check_callable(progress, "progress")
        access = access or HostAccess(environment or {})
        self._addresses = [access.address(url) for url in urls]
        self.urls = [address.url for address in self._addresses]
        self._reactor = reactor
        if not isinstance(destination, Destination):
            kind = ReadOnlyDestination if dry_run else Destination
            destination = kind(os.fspath(destination))
        self._destination = destination
        self._workers = workers or Workers(reactor, threads=1, waiting_limit=1 << 16)
        self._durability = durability
        self._connections = connections
        policy = None if access.tls is None else TlsPolicy(access.tls)
        self._secured = None if policy is None else StandardEndpoints(reactor, policy)
        self._endpoints: Any = endpoints or self._secured or StandardEndpoints(reactor)
        self._verify_policy = VerifyPolicy(paranoid, sample, random.Random(seed))
        self._limit = limit_bytes_per_s
        self._progress = progress
        self._dry_run = dry_run
        # The epoll driver supports neither custom endpoints nor a rate limit.
        self._sprints = endpoints is None and self._limit is None and can_use_epoll(self._addresses)
        self._running: TwistedDriver | None = None
        self._in_flight: set[Deferred[Report]] = set()
        self._closed = False

    def is_stopped(self) -> bool:
        """Return whether the mirror is closed; may be called in any thread."""
        return self._closed

    async def fetch_small(self, number: int, asked: Sequence[tuple[str, int]]) -> SmallResponses:
        """Fetch files with unknown hashes from one mirror; see ``SmallFiles.fetch_all``."""
        address = self._addresses[number]
        return await SmallFiles(self._reactor, address, self._connector).fetch_all(asked)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """
        Call a function in the destination's thread; fires with its result. After ``close``, fails with
        UsageError.
        """
        if self._closed:
            return fail(_closed())
        return self._workers.run(function, *args, **kwargs)

    def sync(
        self, files: Iterable[MirrorEntry], *, staged: bool = False, always: bool = False
    ) -> Deferred[Report]:
        """
        Fetch files that do not exist or are wrong; fires when all are present or have failed.

        Args:
            files: read while the first of them are being fetched, in the reactor's thread or that of the
                destination.
            staged: keep the files unpublished until ``release``; for indexes, which are published last.
            always: fetch even if the mirror is for a dry run.

        Cancelling the Deferred closes all connections; received files are kept for the next run.

        Raises (through the Deferred):
            BadEntry: an entry is refused; this and the following files are not fetched.
            MirrorError: the destination accepts no more files.
            UsageError: a run is in progress, the mirror is closed or has no URL, or ``files`` has a wrong
                type.
        """
        dry_run = self._dry_run and not always
        work = MirrorRun(
            self._destination,
            self._addresses,
            self._verify_policy,
            staged,
            not dry_run,
            self._reactor.seconds,
        )
        return self._start(self._sync(work, files, dry_run))

    def finish(self, work: MirrorRun) -> Deferred[Report]:
        """Complete a run that the epoll driver has begun; fires like ``sync``."""
        return self._start(self._sync(work, (), False))

    def _start(self, work: Coroutine[Any, Any, Report]) -> Deferred[Report]:
        running = start_cancellable(work, self._reactor)
        self._in_flight.add(running)

        def ended(result: Any) -> Any:
            self._in_flight.discard(running)
            return result

        return running.addBoth(ended)

    async def _sync(self, work: MirrorRun, files: Iterable[MirrorEntry], dry_run: bool) -> Report:
        if self._closed:
            raise _closed()
        check_kind(files, Iterable, "files", "a list of paths, sizes and hashes")
        if self._running is not None:
            raise UsageError("this mirror is being brought up to date already; wait for that")
        if not self._addresses:
            raise UsageError("a mirror needs at least one URL to mirror from")
        options = SyncOptions(
            policy=self._durability,
            connections=self._connections,
            connect=self._connector,
            limit=self._limit,
            progress=self._progress,
            dry_run=dry_run,
            sprints=self._sprints and not dry_run,
        )
        run = self._running = TwistedDriver(
            self._reactor, self._addresses, work, self._workers, options
        )
        try:
            return await run.run(files)
        finally:
            self._running = None
            run.close()

    def verify(self) -> Deferred[Report]:
        """
        Check that all files of the last complete run exist and are right; makes no request.

        Files that are recorded as right take little time, unless the mirror is ``paranoid``, or a file is
        drawn for the ``sample``. The report's ``failed`` names missing and wrong files.

        Raises (through the Deferred):
            MirrorError: no run to this destination was complete.
        """
        progress = self._progress

        def report_progress(report: Report) -> None:
            if progress is not None:
                self._reactor.callFromThread(progress, report)

        return self.run(
            verify,
            self._destination,
            self._verify_policy,
            report_progress,
            lambda: self._closed,
            self._reactor.seconds,
        )

    def complete(self, entries: Iterable[ArchiveFile]) -> Deferred[None]:
        """Record ``entries`` as the files of the last complete run; ``verify`` uses the record."""
        return self.run(write_manifest, self._destination, entries)

    def delete_others(self, paths: Iterable[str], dry_run: bool = False) -> Deferred[list[str]]:
        """
        Remove all files except ``paths``; fires with the removed paths.

        Args:
            dry_run: remove nothing; fires with what would be removed.
        """
        return self.run(self._destination.delete_others, paths, dry_run)

    @property
    def destination(self) -> Destination:
        """The destination; to be used only in its thread, with ``run``."""
        return self._destination

    def _connector(self, address: Address) -> Callable[[], Any]:
        uri = URI.fromBytes(address.url.encode("ascii", "replace"))
        proxy = address.proxy
        if proxy is None:
            return lambda: self._endpoints.endpointForURI(uri)
        socks = proxy.socks
        if socks is not None:
            endpoints = self._secured or StandardEndpoints(self._reactor)
            return lambda: endpoints.through(socks, uri)
        via = URI.fromBytes(proxy.url.encode("ascii"))
        if address.scheme == "http":
            return lambda: self._endpoints.endpointForURI(via)
        return lambda: tunnelled(self._endpoints.endpointForURI(via), uri, proxy, self._secured)

    def close(self) -> Deferred[None]:
        """Cancel the current run, and close the destination; fires when nothing is being written any more."""
        self._closed = True
        for running in list(self._in_flight):
            running.cancel()
        if self._running is not None:
            self._running.close()
        done = self._workers.stop()

        return done.addCallback(lambda _: self._destination.close())


def _check(
    urls: object,
    destination: object,
    durability: object,
    connections: int,
    sample: object,
    limit_bytes_per_s: object,
) -> None:
    """Raise UsageError for invalid arguments of a mirror."""
    if not isinstance(urls, Sequence) or isinstance(urls, (str, bytes)):
        raise UsageError(f"mirrors are named by a list of URLs, not {shown(urls)}")
    for url in urls:
        check_kind(url, str, "the URL of a mirror", "text")
    check_kind(destination, (str, os.PathLike, Destination), "destination", "a path")
    if durability not in get_args(Policy):
        known = ", ".join(map(repr, get_args(Policy)))
        raise UsageError(f"durability is one of {known}, not {shown(durability)}")
    check_whole(connections, "connections")
    if not 1 <= connections <= 64:
        raise UsageError(f"{connections} connections are not possible; give 1 to 64")
    check_kind(sample, (int, float), "a sample", "a share from 0 to 1")
    if not 0.0 <= sample <= 1.0:  # type: ignore[operator]
        raise UsageError(f"a sample of {sample} is not possible; give 0 to 1")
    if limit_bytes_per_s is not None:
        check_kind(limit_bytes_per_s, (int, float), "a limit", "a number of bytes a second")
        if not limit_bytes_per_s > 0:  # type: ignore[operator]
            raise UsageError(
                f"a limit of {limit_bytes_per_s} bytes per second is not possible; give more than 0"
            )


def _closed() -> UsageError:
    return UsageError("this mirror is closed; make another one")

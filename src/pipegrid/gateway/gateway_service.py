"""
A gateway as a service: it listens, writes the node files, and finishes requests before it stops.

The node files are for other programs, as a Tahoe-LAFS node writes them in its directory:

    node.url                 its address; replaced at every start
    running.process          see ``disk.directory_claim``
    private/api_auth_token   a new secret at every start
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from errno import EADDRINUSE
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.application.service import MultiService
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.core.text import counted
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.directory_claim import DirectoryClaim
from pipegrid.errors import UsageError
from pipegrid.gateway.gateway_settings import GatewaySettings, SftpSettings
from pipegrid.gateway.http_site import GatewaySite
from pipegrid.gateway.request_origin import LOOPBACK
from pipegrid.gateway.restic.restic_resource import ResticResource
from pipegrid.gateway.root_resource import Monitoring, root_resource
from pipegrid.gateway.transfer_records import RecordedGrid
from pipegrid.tree.tree_grid import Grid

if TYPE_CHECKING:
    from pipegrid.gateway.sftp.ssh_server import SftpServer

URL_NAME = "node.url"
TOKEN_NAME = "private/api_auth_token"
TOKEN_BYTES = 32


class NodeFiles:
    """
    The node files of one gateway in its directory.

    Attributes:
        token: the content of ``private/api_auth_token``; empty until ``claim`` is called.
    """

    def __init__(self, directory: Path) -> None:
        self.token = ""
        self._directory = directory
        self._claim: DirectoryClaim | None = None

    def claim(self) -> None:
        """
        Claim the directory for this process, and create a token.

        Raises:
            UsageError: another gateway or a Tahoe-LAFS node uses the directory, or it is not writable.
        """
        try:
            self._claim = DirectoryClaim(self._directory)
            self.token = urlsafe_b64encode(os.urandom(TOKEN_BYTES)).decode("ascii")
            self._write(TOKEN_NAME, self.token, 0o600)
        except OSError as error:
            self.release()
            raise UsageError(
                f"cannot write in {self._directory}: {error.strerror}; a gateway writes its address there"
            ) from error

    def announce(self, url: str) -> None:
        """
        Write the gateway's address to ``node.url``; call this when the port is open.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            self._write(URL_NAME, url, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot write {self._directory / URL_NAME}: {error.strerror}; other programs look there for "
                "the gateway"
            ) from error

    def release(self) -> None:
        """Release the directory; ``node.url`` stays, as with a Tahoe-LAFS node."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def _write(self, name: str, text: str, mode: int) -> None:
        data = f"{text}\n".encode("ascii")
        replace_file(self._directory / name, data, mode=mode, durable=False)


log = Logger()

ENDING_S = 20.0
"""Maximum time that ``stop`` waits for files of SFTP, and then again for running requests."""

KEYS_AHEAD = 16
"""Number of directory keys made in advance: a new restic repository and its first backup need about 12."""

_LOOK_S = 0.1

WEB_EXPOSED = "can store files, and can use each capability that it knows"
SFTP_EXPOSED = "can try to log in; prefer accounts with public keys to passwords"


class RunningGateway:
    """
    A gateway of an open grid.

    Args:
        reactor: the running reactor.
        say: called with a sentence for each port that other machines can reach.

    Attributes:
        url: address of the gateway; empty until the gateway listens.
        site: the HTTP server; None until it has started.
        files: the node files in the gateway's directory.
    """

    def __init__(
        self,
        reactor: Any,
        grid: Grid,
        settings: GatewaySettings,
        say: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.url = ""
        self.files = NodeFiles(settings.directory)
        self.site: GatewaySite | None = None
        self._reactor = reactor
        self._grid = RecordedGrid.of(grid)
        grid.storing_lock.leave_when_idle()
        self._settings = settings
        self._say = say
        self._monitoring = Monitoring(self._grid, settings, lambda: self.files.token)
        self._ports: list[Any] = []
        self._sftp: SftpServer | None = None

    async def start(self) -> None:
        """
        Claim the directory, and listen.

        Raises:
            UsageError: the directory or a port cannot be used, or a setting of SFTP or restic is not valid.
        """
        self.files.claim()
        try:
            further = self._monitoring.resources(lambda: site.served, lambda: len(site.channels))
            further[b"restic"] = ResticResource(self._grid, self._settings)
            root = root_resource(self._grid, self._settings, self._monitoring.handles, further)
            site = self.site = GatewaySite(root, self._settings, self._reactor)
            port = await self._listen(self._settings.port, site, "web.port")
            if self._settings.sftp is not None:
                await self._start_sftp(self._settings.sftp)
            self._grid.keep_keys(KEYS_AHEAD)
            self.url = url_of(port.getHost())
            self.files.announce(self.url)
        except BaseException:
            await self.stop(0.0)
            raise

    async def _start_sftp(self, settings: SftpSettings) -> None:
        try:
            from pipegrid.gateway.sftp.ssh_server import open_sftp
        except ImportError as error:
            raise UsageError(
                f"SFTP needs Twisted Conch and its dependencies ({error.name} is missing); install "
                "'twisted[conch]', or set enabled = false in [sftpd]"
            ) from error
        self._sftp = open_sftp(self._grid, settings, self._settings.temporary)
        port = await self._listen(settings.port, self._sftp.factory, "[sftpd] port", SFTP_EXPOSED)
        where = port.getHost()
        log.info("SFTP listens at {host}:{port}", host=where.host, port=where.port)

    async def _listen(
        self, text: str, factory: Any, setting: str, exposed: str = WEB_EXPOSED
    ) -> Any:
        try:
            endpoint = serverFromString(self._reactor, text)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UsageError(
                f"{setting} is {text!r}, which is not an endpoint ({error}); write one such as "
                "'tcp:3456:interface=127.0.0.1'"
            ) from error
        try:
            port = await endpoint.listen(factory)
        except (CannotListenError, OSError, OverflowError) as error:
            cause = error.socketError if isinstance(error, CannotListenError) else error
            reason = getattr(cause, "strerror", None) or str(cause).rstrip(".")
            is_taken = getattr(cause, "errno", None) == EADDRINUSE
            raise UsageError(
                f"cannot listen at {text}: {reason}; {'stop what listens there, or ' if is_taken else ''}"
                f"choose another port with {'--port' if exposed is WEB_EXPOSED else setting}"
            ) from error
        self._ports.append(port)
        where = port.getHost()
        host = str(getattr(where, "host", ""))
        if host and host not in LOOPBACK:
            self._say(
                f"{setting} listens at {host}:{where.port}, so every machine that reaches it {exposed}"
            )
        return port

    async def wait_until_cancelled(self) -> None:
        """Return when the caller is cancelled, for example by SIGTERM or Ctrl-C."""
        with suppress(CancelledError):
            await Deferred()

    async def stop(self, ending_s: float = ENDING_S) -> None:
        """
        Stop listening, and release the directory at the end.

        Wait at most ``ending_s`` for files of SFTP to be stored, then at most ``ending_s`` for running HTTP
        requests; interrupt those that are left.
        """
        for port in self._ports:
            await maybeDeferred(port.stopListening)
        self._ports = []
        if self._sftp is not None:
            await self._sftp.stop(ending_s)
        site = self.site
        if site is not None:
            self._monitoring.private.close()
            await self._wait_for(site, ending_s)
            left = len(site.running)
            if left:
                what = counted(left, "request was", "requests were")
                log.warn("{what} interrupted, since the gateway stops", what=what)
            site.close_all()
            self._monitoring.close()
            await deferLater(self._reactor, 0)
        self.files.release()

    async def _wait_for(self, site: GatewaySite, ending_s: float) -> None:
        until_s = self._reactor.seconds() + ending_s
        for channel in list(site.channels):
            if not channel.requests:
                channel.abort()
        running = len(site.running)
        if running and ending_s:
            log.info(
                "the gateway stops when {what} answered, in {seconds:.0f} s at most",
                what=counted(running, "request is", "requests are"),
                seconds=ending_s,
            )
        while site.running and self._reactor.seconds() < until_s:
            await deferLater(self._reactor, _LOOK_S)


class GatewayService(MultiService):
    """
    A gateway and its grid, started and stopped together with a Twisted application.

    Args:
        failed: called with the exception if the gateway cannot start.
    """

    def __init__(
        self, reactor: Any, settings: GatewaySettings, failed: Callable[[BaseException], object]
    ) -> None:
        super().__init__()
        self.gateway: RunningGateway | None = None
        self._reactor = reactor
        self._settings = settings
        self._failed = failed
        self._grid: Grid | None = None
        self._starting: Deferred[None] | None = None

    def startService(self) -> None:
        """Open the grid and listen."""
        super().startService()
        self._starting = Deferred.fromCoroutine(self._start())
        self._starting.addErrback(self._fail)

    def _fail(self, failure: Failure) -> None:
        assert failure.value is not None
        if not failure.check(CancelledError):
            self._failed(failure.value)

    async def _start(self) -> None:
        self._grid = await Grid.open(
            self._reactor, self._settings.directory, follows_blacklist=True
        )
        self.gateway = RunningGateway(
            self._reactor, self._grid, self._settings, lambda text: log.warn("{text}", text=text)
        )
        await self.gateway.start()
        log.info("listening at {url}", url=self.gateway.url)

    def stopService(self) -> Deferred[None]:
        """Stop the gateway and close the grid; the Deferred fires when both have ended."""
        super().stopService()
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self.gateway is not None:
            await self.gateway.stop()
        if self._grid is not None:
            await self._grid.close()


def url_of(address: Any) -> str:
    """
    Return the URL at which this machine reaches a port; for a Unix socket, return ``unix:`` and its path.
    """
    path = getattr(address, "name", None)
    if path is not None:
        return f"unix:{path.decode() if isinstance(path, bytes) else path}"
    host = str(getattr(address, "host", "127.0.0.1"))
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{getattr(address, 'port', 80)}/"

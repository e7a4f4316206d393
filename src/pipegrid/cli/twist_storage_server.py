"""
The storage server as a service of ``twist``:

    twist pipegrid --directory DIR [--port PORT] [--durability batch] ...

The options are those of ``pipegrid serve``, and the directory's settings are used in the same way. The log
contains the NURL and the fURL. A server that cannot start ends the process, with the error message and the
status of ``pipegrid serve``.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python import usage

from pipegrid.cli import serve_record, tell_time
from pipegrid.cli.cmd_serve import ServeOptions, settings_of
from pipegrid.cli.error_report import ExitStatus, sentence, status_of
from pipegrid.cli.options import byte_space
from pipegrid.disk.file_system_calls import few_files
from pipegrid.errors import UsageError
from pipegrid.grid.client_config import parse_kept
from pipegrid.reactor.process_settings import make_monotonic, need_no_threads
from pipegrid.server.serve import DURABILITIES, ServeSettings, StorageNode
from pipegrid.server.systemd import end_without_memory

log = Logger()

tell_time()  # corrects the clock beyond 2262 for modules that twist has loaded


def _space_bytes(text: str) -> int:
    try:
        return byte_space(text)
    except click.BadParameter as error:
        raise ValueError(error.message) from None


class Options(usage.Options):
    """
    The options of ``twist pipegrid``, checked like those of ``pipegrid serve``.

    Attributes:
        settings: the settings of the server, after the options were parsed.
    """

    settings: ServeSettings
    optParameters = [
        ["directory", "d", None, "The node's directory."],
        ["port", "p", None, "A TCP port or an endpoint; several with commas."],
        ["location", None, None, "Where clients find the server, HOST:PORT; several with commas."],
        ["storage", None, None, "The storage directory."],
        ["reserved-space", None, None, "Disk space to leave free.", _space_bytes],
        ["quota", None, None, "Space for all shares.", _space_bytes],
        ["keep-unfinished", None, None, "How long unfinished uploads are kept.", parse_kept],
        ["durability", None, "batch", "none, batch or strict."],
        ["metrics", None, None, "A port or an endpoint for Prometheus."],
        ["tor-control-port", None, None, "Tor's control port, for --tor."],
        ["nickname", None, None, "The server's nickname."],
        ["max-connections", None, None, "Connections at a time.", int],
        ["max-per-address", None, None, "Of these, from one address.", int],
    ]
    optFlags = [
        ["read-only", None, "Accept no new shares."],
        ["tor", None, "Be an onion service, and listen on this machine only."],
        ["no-tor", None, "Serve openly what was an onion service."],
        ["expire-leases", None, "Remove shares whose leases have all expired."],
    ]

    def __init__(self) -> None:
        super().__init__()
        self._introducers: list[str] = []
        self._certificates: list[str] = []
        self._options = ServeOptions()

    def opt_introducer(self, furl: str) -> None:
        """Announce the server there; 'configured' or 'none'."""
        self._introducers.append(furl)

    def opt_certificate(self, file: str) -> None:
        """Announce this certificate of a grid manager, in addition to those installed in the directory."""
        self._certificates.append(file)

    def postOptions(self) -> None:
        """Raise an error for invalid values, or if the process is not allowed to open enough files."""
        if (why := few_files()) is not None:
            raise usage.UsageError(why)
        if self["directory"] is None:
            raise usage.UsageError("give the node's directory with --directory")
        if self["durability"] not in DURABILITIES:
            raise usage.UsageError(f"the durability is one of {', '.join(DURABILITIES)}")
        for name, least in (("max-connections", 16), ("max-per-address", 1)):
            if self[name] is not None and self[name] < least:
                raise usage.UsageError(f"--{name} is at least {least}")
        try:
            self.settings = self._read()
        except UsageError as error:
            raise usage.UsageError(str(error)) from None

    def _read(self) -> ServeSettings:
        options = ServeOptions(
            port=self["port"],
            location=self["location"],
            storage=self["storage"],
            reserved_bytes=self["reserved-space"],
            quota_bytes=self["quota"],
            keep_unfinished_s=self["keep-unfinished"],
            read_only=bool(self["read-only"]),
            durability=self["durability"],
            expire_leases=bool(self["expire-leases"]),
            metrics=self["metrics"],
            introducers=tuple(self._introducers),
            nickname=self["nickname"],
            certificates=tuple(self._certificates),
            tor=True if self["tor"] else False if self["no-tor"] else None,
            tor_control_port=self["tor-control-port"],
            max_connections=self["max-connections"],
            max_per_address=self["max-per-address"],
        )
        settings, self._options = settings_of(
            Path(self["directory"]),
            options,
            lambda warning: log.warn("{sentence}", sentence=warning),
        )
        return settings

    def keep(self, node: StorageNode) -> None:
        """Record the options with which the server has started; log if that fails."""
        failed = serve_record.keep(Path(self["directory"]), self._options._asdict(), node)
        if failed is not None:
            log.warn("{failed}", failed=failed)


class ExitWithStatus:
    """
    Ends the process with an exit status after a service failed, although ``twist`` supports no such status.

    A failure before the reactor runs raises ``SystemExit``. After a later failure, the reactor is stopped,
    and ``at_exit`` ends the process after all other cleanup.

    Args:
        end: ends the process without further work of the interpreter.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.status = ExitStatus.DONE
        self._end = end

    def fail(self, error: BaseException, reactor: Any, log: Logger) -> None:
        """Log the error of a service, record the exit status for it, and stop the reactor if it runs."""
        log.critical("{error}", error=sentence(error))
        self.status = status_of(error)
        if reactor.running:
            reactor.stop()

    def at_exit(self) -> None:
        """End the process with the recorded status, unless that is 0; the interpreter calls this last."""
        if self.status is not ExitStatus.DONE:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError, AttributeError):  # the stream may be unusable
                    stream.flush()
            self._end(self.status)


class StorageService(Service):
    """A service that runs a storage server while its application runs."""

    def __init__(
        self,
        reactor: Any,
        settings: ServeSettings,
        exits: ExitWithStatus | None = None,
        started: Callable[[StorageNode], object] = lambda node: None,
    ) -> None:
        self._when_started = started
        self.node = StorageNode(reactor, settings)
        self._reactor = reactor
        self._exits = exits or ExitWithStatus()

    def startService(self) -> None:
        """
        Start the server; if that fails, the process ends.

        Raises:
            SystemExit: the server failed at once.
        """
        super().startService()
        need_no_threads(self._reactor)
        self.node.start().addCallbacks(self._started, self._failed)
        if self._exits.status is not ExitStatus.DONE:
            raise SystemExit(int(self._exits.status))

    def stopService(self) -> Deferred[None]:
        """Stop the server; return a Deferred that fires when it has stopped. The reactor runs until then."""
        super().stopService()
        return self.node.stop()

    def _started(self, node: StorageNode) -> None:
        self._when_started(node)
        log.info("listening at {nurl} and {furl}", nurl=node.nurl, furl=node.furl)

    def _failed(self, failure: Any) -> None:
        self._exits.fail(failure.value, self._reactor, log)


def own_process() -> tuple[Any, ExitWithStatus]:
    """
    Prepare the process, which runs only this service, whatever its program is; return its reactor and
    ``ExitWithStatus``.
    """
    from twisted.internet import reactor

    exits = ExitWithStatus()
    atexit.register(exits.at_exit)
    end_without_memory()
    make_monotonic(reactor)
    return reactor, exits


def makeService(options: Options) -> StorageService:
    """Return the service, for ``twist``."""
    reactor, exits = own_process()
    return StorageService(reactor, options.settings, exits, options.keep)

"""
The gateway as a service of ``twist``:

    twist pipegrid-gateway --directory DIR [--port PORT] [--host NAME] ...

The options are those of ``pipegrid gateway``. A gateway that cannot start ends the process, with the error
message and the status of ``pipegrid gateway``.
"""

from __future__ import annotations

from pathlib import Path

from twisted.logger import Logger
from twisted.python import usage

from pipegrid.cli import tell_time
from pipegrid.cli.twist_storage_server import own_process
from pipegrid.disk.file_system_calls import few_files
from pipegrid.errors import UsageError
from pipegrid.gateway.gateway_service import GatewayService
from pipegrid.gateway.gateway_settings import GatewaySettings, ResticSettings, load_settings

log = Logger()

tell_time()  # corrects the clock beyond 2262 for modules that twist has loaded


class GatewayOptions(usage.Options):
    """
    The options of ``twist pipegrid-gateway``, checked like those of ``pipegrid gateway``.

    Attributes:
        settings: the settings of the gateway, after the options were parsed.
    """

    settings: GatewaySettings
    optParameters = [
        ["directory", "d", None, "The client's directory, perhaps a Tahoe-LAFS node's."],
        ["port", "p", None, "A TCP port or an endpoint; by default the directory's web.port."],
        ["htpasswd-file", None, None, "Users and passwords of restic's clients."],
    ]
    optFlags = [
        ["append-only", None, "restic's clients may store and read, and remove only locks."],
        ["private-repos", None, "restic's users have access to their own repositories alone."],
        ["no-auth", None, "restic's clients on this machine need no password."],
    ]

    def __init__(self) -> None:
        super().__init__()
        self._hosts: list[str] = []

    def opt_host(self, name: str) -> None:
        """A name by which clients reach the gateway; may be repeated."""
        self._hosts.append(name)

    def postOptions(self) -> None:
        """Raise an error for invalid values, or if the process is not allowed to open enough files."""
        if (why := few_files()) is not None:
            raise usage.UsageError(why)
        if self["directory"] is None:
            raise usage.UsageError("give the client's directory with --directory")
        try:
            file = self["htpasswd-file"]
            restic = ResticSettings(
                None if file is None else Path(file),
                bool(self["append-only"]),
                bool(self["private-repos"]),
                bool(self["no-auth"]),
            )
            self.settings = load_settings(
                Path(self["directory"]),
                port=self["port"],
                hosts=tuple(self._hosts),
                restic=restic,
            )
        except UsageError as error:
            raise usage.UsageError(str(error)) from None


def makeService(options: GatewayOptions) -> GatewayService:
    """Return the service, for ``twist``."""
    reactor, exits = own_process()
    return GatewayService(reactor, options.settings, lambda error: exits.fail(error, reactor, log))

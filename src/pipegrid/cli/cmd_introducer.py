"""``pipegrid introducer``: passes on the addresses of a grid's servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from pipegrid.cli import log_file
from pipegrid.cli.command_job import GridJob, Invocation, OpenGrid, failure
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import common_options, connection_limit_options, gathered, log_option
from pipegrid.cli.startup import lazy_modules
from pipegrid.grid import introducer_settings
from pipegrid.reactor.process_settings import SHORTAGE
from pipegrid.server import introducer_process, systemd


class IntroducerOptions(NamedTuple):
    """
    The options of ``introducer``; see their declarations. None: not given, so the directory's setting or the
    default applies.
    """

    port: str | None = None
    location: str | None = None
    metrics: str | None = None
    max_connections: int | None = None
    max_per_address: int | None = None
    log_path: str | None = None


class IntroducerJob(GridJob):
    """A job that runs an introducer until it is stopped, which counts as success."""

    asks_servers = False

    def __init__(self, options: IntroducerOptions) -> None:
        self._options = options

    async def run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        """Run the introducer; cancelling stops it in an orderly way, and gives status 0."""
        lazy_modules.bring_in(log_file, introducer_process, introducer_settings, systemd)
        console, options = invocation.console, self._options
        # Called first, so that a lack of memory in the code below ends the process, too.
        forget = systemd.end_without_memory()
        try:
            with log_file.logging_to(console, options.log_path, reactor):
                SHORTAGE.tell = None  # the log reports a shortage of threads
                given = invocation.directory
                directory = introducer_settings.usual_directory() if given is None else Path(given)
                found = introducer_settings.load(directory)
                for warning in found.warnings:
                    console.note(warning)
                chosen = {
                    "port": options.port,
                    "location": options.location,
                    "status": options.metrics,
                    "max_connections": options.max_connections,
                    "max_per_address": options.max_per_address,
                }
                said = {name: value for name, value in chosen.items() if value is not None}
                settings = introducer_process.IntroducerSettings(
                    directory=directory,
                    # A location given on the command line applies to this start only, unless the directory is
                    # new.
                    keeps_location=found.is_new or options.location is None,
                    **{**found.settings, **said},
                )

                def announce(node: introducer_process.IntroducerNode) -> None:
                    if found.is_new:
                        introducer_settings.keep(
                            directory,
                            port=settings.port,
                            status=settings.status,
                            listening=node.listening,
                            hints=node.hints,
                        )
                    console.result(node.furl, {"furl": node.furl, "directory": str(directory)})

                await introducer_process.introduce(reactor, settings, announce)
        except Exception as error:
            return failure(error, console)
        finally:
            forget()
        return ExitStatus.DONE


@click.command(name="introducer")
@click.option(
    "--port",
    metavar="PORT",
    help="A TCP port or a Twisted endpoint; 'tcp:0:interface=127.0.0.1' takes any free one.  "
    "[default: the directory's, or tcp:8099]",
)
@click.option(
    "--location",
    metavar="HOST:PORT",
    help="Where servers and clients find the introducer.  [default: the directory's, or what it listens on]",
)
@click.option(
    "--metrics",
    metavar="PORT",
    help="Serve a status page, its numbers as JSON (/?t=json), and metrics for Prometheus (/metrics) at this "
    "port or endpoint.  [default: the directory's web.port]",
)
@connection_limit_options
@log_option
@common_options
@gathered("options", IntroducerOptions)
def introducer_command(options: IntroducerOptions) -> GridJob:
    """
    Pass on the addresses of a grid's servers to its clients, until it is stopped.

    Prints the introducer's fURL, which is an address and a secret: servers announce themselves with
    'serve --introducer FURL', and clients find them after 'init --introducer FURL'. -d is the introducer's
    own directory, which keeps its key and what it has listed [default: 'pipegrid-introducer' next to your
    own]. It may be that of Tahoe-LAFS's introducer: its tahoe.cfg is followed, its fURL stays the same, and
    Tahoe-LAFS can run it again.
    """
    return IntroducerJob(options)

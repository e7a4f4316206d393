"""``pipegrid speedtest``: compares transfers with the speed of the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipegrid.cli.command_grammar import CommandGroup
from pipegrid.cli.command_job import OfflineJob, ReactorJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, unreadable
from pipegrid.cli.options import byte_size, common_options
from pipegrid.errors import UsageError
from pipegrid.speedtest import html_report, link_proxies, run_comparison, run_results
from pipegrid.speedtest import responder as far_end

# ``pipegrid speedtest``. The module of a command is imported when the command is named.

HOMES = {
    "run": "speedtest_run",
    "selfcheck": "speedtest_run",
    "compare": "cmd_speedtest",
    "report": "cmd_speedtest",
    "responder": "cmd_speedtest",
    "proxy": "cmd_speedtest",
}
"""For each command, the module that defines it, under the same name."""

DEFAULT = "run"
SELF_CHECK = "--self-check"

_FLAGS = ("-v", "--verbose", "-q", "--quiet", "--json")
_VALUED = ("-d", "--directory", "--trace")
_HELP = ("-h", "--help")


class SpeedTestGroup(CommandGroup):
    """A group whose default command is ``run``."""

    homes = {name: (home, name) for name, home in HOMES.items()}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; insert the default command if no command is named."""
        if ctx.resilient_parsing and not with_command(args)[:-1]:
            return super().parse_args(ctx, args)  # for completing an unfinished line
        return super().parse_args(ctx, with_command(args))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Return completions: commands, and options of the default command."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        meant = self.get_command(ctx, DEFAULT)
        assert meant is not None
        with meant.make_context(DEFAULT, [], parent=ctx, resilient_parsing=True) as below:
            own = {item.value for item in found}
            more = [*meant.shell_complete(below, incomplete), CompletionItem(SELF_CHECK)]
        return found + [
            item
            for item in more
            if item.value not in own and str(item.value).startswith(incomplete)
        ]


def with_command(args: list[str]) -> list[str]:
    """Return the arguments; if they name no command, insert the default one after the group's own options."""
    at = 0
    while at < len(args) and args[at].partition("=")[0] in (*_FLAGS, *_VALUED):
        at += 2 if args[at] in _VALUED else 1
    own, rest = args[:at], args[at:]
    if rest[:1] == [SELF_CHECK]:
        return [*own, "selfcheck", *rest[1:]]
    if not rest or (rest[0].startswith("-") and rest[0] not in _HELP):
        return [*own, DEFAULT, *rest]
    return args


@click.group(name="speedtest", cls=SpeedTestGroup, subcommand_metavar="[COMMAND] [ARGS]...")
@common_options
def speedtest_command() -> None:
    """
    Measure how fast files are stored and fetched: in round trips, and compared with raw TCP on the same path.

    Without a command, 'run' is meant: 'pipegrid speedtest --link dsl'. It measures a private grid, which it
    starts and removes again; with -d, the grid of that directory.
    """


# ``pipegrid speedtest compare`` and ``report``: show the results of runs without measuring.


def read_run(path: str) -> run_results.Run:
    """
    Return the run in a file.

    Raises:
        UsageError: the file has no run that this version can read.
        SourceError: the file cannot be read.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return run_results.parse_run(data, path)


@click.command(name="compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--more-before",
    multiple=True,
    metavar="FILE",
    help="Another run before the change; several give a better answer.",
)
@click.option("--more-after", multiple=True, metavar="FILE", help="Another run after the change.")
@click.option("--all", "everything", is_flag=True, help="Also show unchanged measurements.")
@click.option(
    "--anyway", is_flag=True, help="Compare runs that were measured under different conditions."
)
@click.option(
    "--fail-on-regression", is_flag=True, help="Exit with status 1 if anything got slower."
)
@common_options
def compare(
    before: str,
    after: str,
    more_before: tuple[str, ...],
    more_after: tuple[str, ...],
    everything: bool,
    anyway: bool,
    fail_on_regression: bool,
) -> OfflineJob:
    """
    Report what changed beyond noise between two runs, given as files that 'run' wrote.
    """

    def work(console: Console) -> int:
        comparison = run_comparison.compare(
            [read_run(path) for path in (before, *more_before)],
            [read_run(path) for path in (after, *more_after)],
            anyway,
        )
        console.result(comparison.as_text(everything).rstrip("\n"), comparison.as_dict())
        if fail_on_regression and comparison.regressed:
            return ExitStatus.FAILED
        return ExitStatus.DONE

    return OfflineJob(work)


@click.command(name="report")
@click.argument("run")
@click.argument("earlier", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, readable=False),
    default="report.html",
    show_default=True,
    metavar="FILE",
)
@common_options
def report(run: str, earlier: Sequence[str], output: str) -> OfflineJob:
    """
    Write one HTML file about a run; with EARLIER runs, oldest first, also a history.
    """

    def work(console: Console) -> int:
        html_report.check_libraries()
        html_report.write_report(output, read_run(run), [read_run(path) for path in earlier])
        console.result(output, {"path": output})
        return ExitStatus.DONE

    return OfflineJob(work)


# ``pipegrid speedtest responder`` and ``proxy``: the far end of a measured path, and an emulated link.


@click.command(name="responder")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port to listen on.  [any that is free]",
)
@click.option(
    "--token",
    metavar="TEXT",
    envvar="PIPEGRID_RESPONDER_TOKEN",
    help="The secret that opens it; other users see options, not $PIPEGRID_RESPONDER_TOKEN.  [a random one]",
)
@click.option(
    "--max-bytes",
    type=byte_size,
    default="10GB",
    show_default=True,
    help="Exit after this many bytes.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(1, 7 * 86400),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Exit after this time.",
)
@common_options
def responder(
    host: str, port: int, token: str | None, max_bytes: int, max_seconds: float
) -> ReactorJob:
    """
    Serve as the far end of raw TCP streams, for clients that know the token; ends after a time.

    Prints what to give to 'pipegrid speedtest run --responder'.
    """

    async def work(reactor: Any, console: Console) -> int:
        import secrets

        settings = far_end.ResponderSettings(
            host, port, token or secrets.token_hex(16), max_bytes, max_seconds
        )
        await far_end.responder_main(
            reactor, settings, lambda text: console.result(str(text), {"responder": str(text)})
        )
        return ExitStatus.DONE

    return ReactorJob(work)


@click.command(name="proxy")
@click.argument("pairs", nargs=-1, required=True, metavar="[HOST:]PORT=HOST:PORT...")
@click.option("--link", metavar="PROFILE", help="dsl, colo, wan or lfn.")
@click.option("--rtt", metavar="TIME", help="Round trip, such as 11ms.")
@click.option("--up", metavar="RATE", help="Rate from clients to the target, such as 80kB/s.")
@click.option("--down", metavar="RATE", help="Back.")
@common_options
def proxy(
    pairs: tuple[str, ...], link: str | None, rtt: str | None, up: str | None, down: str | None
) -> ReactorJob:
    """
    Emulate one link for all connections to all these ports, until it is stopped.

    'pipegrid speedtest proxy --link dsl 8000=127.0.0.1:80'
    """

    async def work(reactor: Any, console: Console) -> int:
        found = link_proxies.make_link(link, rtt, up, down)
        if found is None:
            raise UsageError("name the link to emulate: --link dsl, or --rtt, --up and --down")
        await link_proxies.proxy_main(
            reactor,
            link_proxies.shape_of(found),
            [link_proxies.parse_pair(pair) for pair in pairs],
            lambda text: console.result(str(text), {"proxy": str(text)}),
        )
        return ExitStatus.DONE

    return ReactorJob(work)

"""``pipegrid speedtest responder`` and ``proxy``: the far end of a measured path, and an emulated path."""

from __future__ import annotations

from typing import Any

import click

from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import common_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.sizes import byte_size
from pipegrid.cli.speedtest_run import SpeedTestJob


@click.command(name="responder")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[any that is free]")
@click.option(
    "--token",
    metavar="TEXT",
    envvar="PIPEGRID_RESPONDER_TOKEN",
    help="The secret that opens it; other users see options, not $PIPEGRID_RESPONDER_TOKEN.  [a random one]",
)
@click.option(
    "--max-bytes", type=byte_size, default="10GB", show_default=True, help="Moved in all."
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(1, 7 * 86400),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="After which it ends.",
)
@common_options
def responder(
    host: str, port: int, token: str | None, max_bytes: int, max_seconds: float
) -> GridJob:
    """
    Be the far end of raw TCP streams, for clients that know the token; ends by itself.

    Prints what to give to 'pipegrid speedtest run --responder'.
    """

    async def serve(reactor: Any, invocation: Invocation) -> int:
        import secrets

        from pipegrid.speedtest.responder import ResponderSettings, responder_main

        console = invocation.console
        settings = ResponderSettings(
            host, port, token or secrets.token_hex(16), max_bytes, max_seconds
        )
        await responder_main(
            reactor, settings, lambda text: console.result(str(text), {"responder": str(text)})
        )
        return ExitStatus.DONE

    return SpeedTestJob(serve)


@click.command(name="proxy")
@click.argument("pairs", nargs=-1, required=True, metavar="[HOST:]PORT=HOST:PORT...")
@click.option("--link", metavar="PROFILE", help="dsl, colo, wan or lfn.")
@click.option("--rtt", metavar="TIME", help="Round trip, such as 11ms.")
@click.option("--up", metavar="RATE", help="From clients to the target, such as 80kB/s.")
@click.option("--down", metavar="RATE", help="Back.")
@common_options
def proxy(
    pairs: tuple[str, ...], link: str | None, rtt: str | None, up: str | None, down: str | None
) -> GridJob:
    """
    Emulate one link, which all connections to all these ports share, until it is stopped.

    'pipegrid speedtest proxy --link dsl 8000=127.0.0.1:80'
    """

    async def relay(reactor: Any, invocation: Invocation) -> int:
        from pipegrid.errors import UsageError
        from pipegrid.speedtest.link_proxy import make_link, parse_pair, proxy_main, shape_of

        found = make_link(link, rtt, up, down)
        if found is None:
            raise UsageError("say what link to emulate: --link dsl, or --rtt, --up and --down")
        console = invocation.console
        await proxy_main(
            reactor,
            shape_of(found),
            [parse_pair(pair) for pair in pairs],
            lambda text: console.result(str(text), {"proxy": str(text)}),
        )
        return ExitStatus.DONE

    return SpeedTestJob(relay)

"""``pipegrid speedtest run`` and ``selfcheck``: measure transfers, and check the measuring itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from pipegrid.cli.command_job import Invocation, ReactorJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus, sentence
from pipegrid.cli.options import byte_size, common_options
from pipegrid.core import encoding_parameters
from pipegrid.errors import SinkError, UsageError
from pipegrid.speedtest import (
    child_processes,
    html_report,
    link_proxies,
    output_formats,
    raw_tcp_baseline,
    responder_client,
    run_results,
    runner,
    scenarios,
    targets,
)
from pipegrid.speedtest import selfcheck as self_checks

DEFAULT_LINK = "wan"
NO_LINK = "none"
AUTO = "auto"


def window(text: str) -> int | None:
    """Parse the size of a window in bytes; return None for ``auto``."""
    return None if text == AUTO else byte_size(text)


@click.command(name="run")
@click.option(
    "--servers", type=click.IntRange(1, 100), metavar="N", help="Servers of the private grid.  [10]"
)
@click.option(
    "--transport",
    type=click.Choice(["gbs", "foolscap"]),
    help="Protocol of the private grid.  [gbs]",
)
@click.option(
    "--durability",
    type=click.Choice(["none", "batch", "strict"]),
    help="Durability policy of the private grid.  [batch]",
)
@click.option("--gateway", metavar="URL", help="Measure PUT URL/uri and GET URL/uri/CAP.")
@click.option(
    "--link",
    metavar="PROFILE",
    help="The emulated link to the private grid: dsl, colo, wan, lfn, or none.  [wan]",
)
@click.option("--rtt", metavar="TIME", help="Round trip of the link, such as 11ms.")
@click.option("--up", metavar="RATE", help="Rate to the servers, such as 80kB/s or 10Mbit/s.")
@click.option("--down", metavar="RATE", help="Rate from the servers.")
@click.option(
    "--rounds", type=click.IntRange(1, 1000), metavar="N", help="Samples of each measurement.  [5]"
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="A scenario or group; may be given several times."
)
@click.option("--quick", is_flag=True, help="Measure one round of one small scenario of each kind.")
@click.option(
    "--window",
    type=window,
    default=AUTO,
    metavar="SIZE",
    help="Bytes in flight per server.  [auto]",
)
@click.option("-k", "--required", type=click.IntRange(1, 256), metavar="K")
@click.option("-n", "--total", type=click.IntRange(1, 256), metavar="N")
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help="Seed of the contents and the order.  [random]",
)
@click.option(
    "--responder",
    "responders",
    multiple=True,
    metavar="ADDRESS",
    help="What 'speedtest responder' printed at the other end: raw TCP is measured with it.",
)
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Where the private grid keeps its shares.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github-smaller", "github-bigger"]),
    help="Format on standard output.  [text; json with --json]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help="Write run.json and report.html there; the report shows earlier runs there, too.",
)
@common_options
@click.pass_obj
def run(invocation: Invocation, /, **given: Any) -> ReactorJob:
    """
    Measure a grid, or a gateway.

    By default a private grid of ten servers is started on this machine, with an emulated link of 100 Mbit/s
    and 40 ms. With -d the grid of that directory is measured, on the real network.
    """

    directory = invocation.directory
    return ReactorJob(lambda reactor, console: _measure(reactor, console, directory, given))


async def _measure(
    reactor: Any, console: Console, directory: str | None, given: dict[str, Any]
) -> int:
    import attrs

    target = make_target(reactor, directory, given)
    if directory is None:  # with a directory, its grid's limits are not known yet
        scenarios.choose(known_scenarios(target, given["quick"]), given["only"])
    rounds = given["rounds"] or (1 if given["quick"] else runner.DEFAULT_ROUNDS)
    seed = random.randrange(1 << 32) if given["seed"] is None else given["seed"]
    settings = runner.Settings(rounds, seed, given["window"])
    if given["quick"]:
        effort = raw_tcp_baseline.Effort(rounds=1, sample_s=0.1, pings=5)
        settings = attrs.evolve(settings, effort=effort)
    form = given["form"] or (output_formats.JSON if console.json else output_formats.TEXT)
    output = None if given["output"] is None else prepare_output(Path(given["output"]))
    result = await runner.run(
        reactor, target, lambda up: choose(up, given, console), settings, console.say
    )
    if form == output_formats.JSON:
        import json

        text = result.as_json()
        console.result(text.rstrip("\n"), json.loads(text))
    else:
        console.results.write(output_formats.formatted(result, form).encode("utf-8") + b"\n")
        console.results.flush()
    if output is not None:
        write_output(output, result, console)
    return ExitStatus.DONE


def make_target(reactor: Any, directory: str | None, given: dict[str, Any]) -> targets.FileTarget:
    """
    Return the target that the options select.

    Raises:
        UsageError: the options contradict each other.
    """
    private = ("servers", "transport", "durability", "link", "rtt", "up", "down", "scratch")
    encoding = ("required", "total")
    if given["gateway"] is not None or directory is not None:
        what = "a gateway" if given["gateway"] is not None else "the grid of a directory"
        names = (*private, *encoding)
        wrong = next((name for name in names if given[name] is not None), None)
        if given["gateway"] is not None and directory is not None:
            raise UsageError("choose one of -d and --gateway")
        if wrong is not None:
            raise UsageError(f"--{wrong} is for private grids; {what} is measured as it is")
        responders = [responder_client.parse_responder(text) for text in given["responders"]]
        if given["gateway"] is not None:
            return targets.Gateway(reactor, given["gateway"], responders)
        return targets.ConfiguredGrid(reactor, Path(str(directory)), responders)
    if given["responders"]:
        raise UsageError("a private grid has responders of its own; --responder is for remote ones")
    servers = given["servers"] or targets.DEFAULT_SERVERS
    return targets.PrivateGrid(
        reactor,
        servers,
        transport=given["transport"] or targets.GBS,
        link=link_of(given),
        encoding=child_processes.FileEncoding.for_servers(
            servers, params_of(given, targets.fitting_params(servers), servers)
        ),
        durability=given["durability"] or "batch",
        scratch=None if given["scratch"] is None else Path(given["scratch"]),
    )


def link_of(given: dict[str, Any]) -> run_results.EmulatedLink | None:
    """Return the emulated link that the options select, or the default link; None for ``--link none``."""
    profile = given["link"]
    details = [given[name] for name in ("rtt", "up", "down")]
    if profile == NO_LINK:
        if any(details):
            raise UsageError(
                "--link none emulates no link; leave it out to give --rtt, --up and --down"
            )
        return None
    if profile is None and not any(details):
        profile = DEFAULT_LINK
    return link_proxies.make_link(profile, *details)


def params_of(
    given: dict[str, Any], default: encoding_parameters.Params, servers: int
) -> encoding_parameters.Params:
    """Return the encoding that the options select, with ``default`` for what they leave out."""
    required, total = given["required"], given["total"]
    total = default.total_shares if total is None else total
    required = min(default.required_shares, total) if required is None else required
    return encoding_parameters.Params(required, total)


def known_scenarios(target: targets.FileTarget, quick: bool) -> list[scenarios.Scenario]:
    """Return all scenarios that a target can be measured with; ``quick``: only the short ones."""
    if quick:
        return scenarios.quick(target.params, target.servers)
    return scenarios.full(target.link, target.params, target.servers)


def choose(
    target: targets.FileTarget, given: dict[str, Any], console: Console
) -> Sequence[scenarios.Scenario]:
    """
    Return the selected scenarios that the target supports and that its link is fast enough for.

    Raises:
        UsageError: no scenario remains.
    """
    chosen = scenarios.choose(known_scenarios(target, given["quick"]), given["only"])
    if not target.adjustable:
        chosen = [each for each in chosen if each.group == run_results.SCENARIO]
    if target.directory is None:
        chosen = [each for each in chosen if each.group != run_results.COLD_START]
    within, beyond = scenarios.split_by_duration(chosen, target.link, target.params)
    if beyond and given["only"] and not within:
        within, beyond = beyond, []  # the user has named no others, so run them
    if beyond:
        names = ", ".join(each.title for each in beyond)
        console.say(f"left out, since they would take minutes on this link: {names}")
    if not within:
        raise UsageError(f"nothing that was chosen can be measured on {target}; choose other names")
    return within


def prepare_output(directory: Path) -> Path:
    """
    Make the directory for a report, before the measurement, which takes minutes.

    Raises:
        UsageError: the directory cannot be made, or a library that draws the report is not installed.
    """
    html_report.check_libraries()
    try:
        (directory / "history").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {directory}: {error.strerror}; choose another") from error
    return directory


def write_output(directory: Path, result: run_results.Run, console: Console) -> None:
    """
    Write the run and a report, which also shows the earlier runs in the directory.

    Raises:
        SinkError: a file cannot be written.
    """
    stamp = result.when.replace(":", "").replace("-", "")
    history = earlier_runs(directory / "history", result)
    try:
        for path in (directory / "run.json", directory / "history" / f"{stamp}.json"):
            path.write_text(result.as_json(), "utf-8")
    except OSError as error:
        raise SinkError(f"cannot write to {directory}: {error.strerror}") from error
    console.say(f"samples: {directory / 'run.json'}")
    try:
        html_report.write_report(directory / "report.html", result, history)
    except UsageError as error:
        console.say(f"no report: {sentence(error)}")
    else:
        console.say(f"report: {directory / 'report.html'}")


def earlier_runs(directory: Path, result: run_results.Run) -> list[run_results.Run]:
    """Return the runs in a directory with ``result``'s parameters (except seed and rounds), oldest first."""
    import attrs

    def what(run: run_results.Run) -> Any:
        return attrs.evolve(run.parameters, seed=0, rounds=0)

    runs = []
    for path in sorted(directory.glob("*.json")):
        with suppress(OSError, UsageError):  # skips files of other versions
            runs.append(run_results.parse_run(path.read_bytes(), str(path)))
    return [each for each in runs if what(each) == what(result)]


@click.command(name="selfcheck")
@common_options
def selfcheck() -> ReactorJob:
    """
    Check on known values that the figures of the speed test are right on this machine.

    Raw streams measured as if they were a scenario must come out as 100 % of raw TCP, within 3 %; an
    emulated round trip of 100 ms as 100 ms, within 1 ms; 10 Mbit/s as that, within 2 %. The exit status is
    1 if not.
    """

    async def work(reactor: Any, console: Console) -> int:
        import attrs

        checks = await self_checks.self_check(reactor, console.say)
        for check in checks:
            console.result(str(check), {**attrs.asdict(check), "passed": check.passed})
        return ExitStatus.DONE if all(check.passed for check in checks) else ExitStatus.FAILED

    return ReactorJob(work)

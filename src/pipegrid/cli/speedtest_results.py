"""``pipegrid speedtest compare`` and ``report``: what runs say, without measuring anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.options import common_options
from pipegrid.cli.outcome import ExitStatus

if TYPE_CHECKING:
    from pipegrid.speedtest.run_results import Run


def read_run(path: str) -> Run:
    """
    Return the run in a file.

    Raises:
        UsageError: it holds none that this version reads.
        SourceError: it cannot be read.
    """
    from pipegrid.cli.outcome import unreadable
    from pipegrid.speedtest.run_results import parse_run

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_run(data, path)


@click.command(name="compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--more-before",
    multiple=True,
    metavar="FILE",
    help="Another run before; several give a better answer.",
)
@click.option("--more-after", multiple=True, metavar="FILE", help="Another run after.")
@click.option("--all", "everything", is_flag=True, help="Show what did not change, too.")
@click.option("--anyway", is_flag=True, help="Compare what was measured under other conditions.")
@click.option(
    "--fail-on-regression", is_flag=True, help="The exit status is 1 if anything got slower."
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
    Say what changed beyond noise between two runs, given as files that 'run' wrote.
    """

    def work(console: Console) -> int:
        from pipegrid.speedtest import compare as comparing

        comparison = comparing.compare(
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
        from pipegrid.speedtest.html_report import check_libraries, write_report

        check_libraries()
        write_report(output, read_run(run), [read_run(path) for path in earlier])
        console.result(output, {"path": output})
        return ExitStatus.DONE

    return OfflineJob(work)

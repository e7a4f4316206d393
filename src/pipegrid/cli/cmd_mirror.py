"""``pipegrid mirror``: package archives from several mirrors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.group import CommandGroup
from pipegrid.cli.job import GridJob, OfflineJob, ReactorGridJob, ReactorJob
from pipegrid.cli.meant import check_no_file
from pipegrid.cli.mirrorarchive import DEBIAN_KEYRING, debian_job, rpm_job
from pipegrid.cli.mirroroptions import (
    check_options,
    fetch_options,
    from_grid_option,
    keep_going_option,
    keyring_option,
    unsigned_option,
)
from pipegrid.cli.mirrortell import tell
from pipegrid.cli.options import common_options, usage_error

if TYPE_CHECKING:
    from pipegrid.cli.mirroring import MirrorOptions
    from pipegrid.grid import Grid


@click.group(name="mirror", cls=CommandGroup)
@common_options
def command() -> None:
    """
    Keep directories of packages up to date from several mirrors at once.

    Files are asked for many at a time, hashed while they come, and get their names only when they are
    right. Files that exist and are known to be right are not requested, so that an interrupted run
    continues where it stopped.
    """


@command.command(name="list")
@click.argument("file", type=click.Path(readable=False))
@click.argument("dest", type=click.Path(readable=False))
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that share the work, and the connections, where one processor limits.",
)
@fetch_options
@common_options
def list_command(
    file: str,
    dest: str,
    jobs: int,
    fetching: MirrorOptions,
) -> ReactorJob | GridJob:
    """
    Fetch the files that FILE names into DEST.

    A line a file: SHA-256 in hex, size in bytes, path, with blanks between. The path is relative to each
    URL and to DEST, and may hold blanks.
    """
    _check_urls(fetching)

    from pipegrid.cli.mirrorlist import list_job

    return list_job(file, dest, jobs, fetching)


@command.command(name="debian")
@click.argument("dest", type=click.Path(readable=False))
@click.option(
    "--suite",
    "suites",
    multiple=True,
    help="Such as sid; several if given again. That of a flat archive ends in a slash: / or its directory.",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    help="Such as main; several if given again. Without it all that the release file names.",
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    default=("amd64",),
    show_default="amd64",
    help="Of binary packages; several if given again.",
)
@click.option("--source", is_flag=True, help="Sources, too.")
@keep_going_option
@keyring_option(f"Keys of who may have signed it. Without it {DEBIAN_KEYRING}, if there is one.")
@from_grid_option
@unsigned_option
@click.option(
    "--ignore-dates",
    is_flag=True,
    help="Accept release files that have expired, as those of frozen suites, or are of the future.",
)
@click.option(
    "--indexes",
    type=click.Choice(["packed", "unpacked", "zstd"]),
    default="packed",
    show_default=True,
    help="How indexes are kept; unpacked and zstd ones are brought up to date by patches.",
)
@click.option("--diffs", is_flag=True, help="Patches of the indexes, too, for readers.")
@click.option(
    "--also",
    multiple=True,
    metavar="GLOB",
    help="Other files that the release file names, such as 'main/i18n/Translation-en.*'.",
)
@fetch_options
@common_options
def debian_command(
    dest: str,
    suites: tuple[str, ...],
    components: tuple[str, ...],
    architectures: tuple[str, ...],
    source: bool,
    keep_going: bool,
    keyrings: tuple[str, ...],
    allow_unsigned: bool,
    ignore_dates: bool,
    from_grid: str | None,
    indexes: str,
    diffs: bool,
    also: tuple[str, ...],
    fetching: MirrorOptions,
) -> ReactorJob | GridJob:
    """
    Keep a Debian archive in DEST.

    Each suite's release file is checked with gpgv, indexes by it, packages by the indexes. Indexes appear
    after the files that they name, so that apt can read from DEST meanwhile.
    """
    if from_grid is not None:
        return bring_back(from_grid, dest, fetching)
    _check_urls(fetching)
    if not suites:
        raise usage_error("give a suite, such as --suite sid")
    _check_keys(keyrings, allow_unsigned)

    fetching.keep_going = keep_going
    options = {
        "suites": suites,
        "components": components,
        "architectures": architectures,
        "source": source,
        "diffs": diffs,
        "also": also,
        "indexes": indexes,
        "ignore_dates": ignore_dates,
    }
    return debian_job(dest, options, keyrings, allow_unsigned, fetching)


@command.command(name="rpm")
@click.argument("dest", type=click.Path(readable=False))
@click.option(
    "--newest-only",
    is_flag=True,
    help="Of packages with the same name and architecture only those with the highest version.",
)
@keep_going_option
@keyring_option("Keys of who may have signed it; bytes or text.")
@from_grid_option
@unsigned_option
@fetch_options
@common_options
def rpm_command(
    dest: str,
    newest_only: bool,
    keep_going: bool,
    keyrings: tuple[str, ...],
    allow_unsigned: bool,
    from_grid: str | None,
    fetching: MirrorOptions,
) -> ReactorJob | GridJob:
    """
    Keep an RPM repository in DEST.

    URL is what repodata is below. Its repomd.xml is checked with gpgv, indexes by it, packages by the
    indexes. repomd.xml appears after all files that it names, so that dnf can read from DEST meanwhile.
    """
    if from_grid is not None:
        return bring_back(from_grid, dest, fetching)
    _check_urls(fetching)
    _check_keys(keyrings, allow_unsigned)

    fetching.keep_going = keep_going
    return rpm_job(dest, newest_only, keyrings, allow_unsigned, fetching)


def _check_keys(keyrings: tuple[str, ...], allow_unsigned: bool) -> None:
    if allow_unsigned and keyrings:
        raise usage_error("with --allow-unsigned no --keyring is used; give one of them")


def _check_urls(fetching: MirrorOptions) -> None:
    if not fetching.urls:
        raise usage_error("there is nowhere to mirror from; give --from URL")


def bring_back(cap: str, dest: str, fetching: MirrorOptions) -> GridJob:
    """Return the job that fetches a mirror from the grid."""
    if fetching.urls or fetching.to_grid:
        raise usage_error("--from-grid goes with neither --from nor --to-grid; leave them out")
    check_no_file(cap)
    fetching.check_deleting(dest)

    async def work(reactor: Any, grid: Grid, console: Console) -> int:
        from pipegrid.cli.mirroring import Display
        from pipegrid.mirror.debian import names_by_hash
        from pipegrid.mirror.grid_archive import GridFetch
        from pipegrid.mirror.mirror import Mirror

        with Display(console) as display:
            mirror = Mirror(
                reactor,
                (),
                dest,
                paranoid=fetching.paranoid,
                sample=fetching.sample_share,
                dry_run=fetching.dry_run,
            )
            try:
                fetch = GridFetch(mirror, grid, cap, names_by_hash)
                removed = await fetch.fetch(fetching.delete, fetching.dry_run, display.show)
            finally:
                await mirror.close()
        return tell(console, fetch.report, dest, removed, fetching.dry_run)

    return ReactorGridJob(work, cap)


@command.command(name="verify")
@click.argument("dest", type=click.Path(exists=True, file_okay=False))
@check_options
@common_options
def verify_command(dest: str, sample: float, paranoid: bool) -> OfflineJob:
    """
    Look whether all that the last complete run wanted is in DEST, and right.

    A file that was hashed once and has not changed since costs a look, not a reading.
    """
    from pipegrid.cli.mirrorverify import verify_job

    return verify_job(dest, paranoid, sample / 100)

"""``pipegrid mirror`` and ``pdiff``: mirror package archives, and apply patches to their indexes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli import cap_list_files, mirror_listed_files, mirror_verify, output_file
from pipegrid.cli.command_grammar import CommandGroup
from pipegrid.cli.command_job import GridJob, OfflineJob, ReactorGridJob, ReactorJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.mirror_debian_rpm import (
    DEBIAN_KEYRING,
    DebianOptions,
    RpmOptions,
    debian_job,
    rpm_job,
)
from pipegrid.cli.mirror_options import MirrorOptions, print_outcome
from pipegrid.cli.options import (
    F,
    all_of,
    as_click,
    as_one,
    byte_rate,
    common_options,
    gathered,
    usage_error,
)
from pipegrid.cli.startup import fast_mirror_args
from pipegrid.errors import SinkError
from pipegrid.mirror import (
    archive_from_grid,
    credentials,
    debian_archive,
    decompression,
    mirror_lists,
    pdiff,
    redirects,
    signatures,
)

if TYPE_CHECKING:
    from pipegrid.grid import Grid


# Options that several commands of ``pipegrid mirror`` have.

check_options = all_of(
    as_click(fast_mirror_args.PARANOID),
    click.option(
        "--sample",
        type=click.FloatRange(0, 100),
        default=0.0,
        metavar="PERCENT",
        help="Hash PERCENT of the existing files, drawn at random.",
    ),
)
"""The options that choose which existing files are hashed again."""

from_grid_option = click.option(
    "--from-grid",
    metavar="CAP",
    help="Instead of --from: fetch what --to-grid stored; no other option is needed.",
)


keep_going_option = as_click(fast_mirror_args.KEEP_GOING)


def keyring_option(help: str = fast_mirror_args.KEYRING.help) -> Callable[[F], F]:
    """Return the option for the keys that sign an archive; its parameter is ``keyrings``."""
    return as_click(
        fast_mirror_args.KEYRING, type=click.Path(readable=False), metavar="FILE", help=help
    )


unsigned_option = as_click(fast_mirror_args.UNSIGNED)


def _fetching(
    limit_rate: str | None,
    ca: str | None,
    client_cert: str | None,
    client_key: str | None,
    **options: Any,
) -> MirrorOptions:
    limit = None if limit_rate is None else byte_rate(limit_rate)
    files = (ca, client_cert, client_key)
    tls = None if files == (None, None, None) else credentials.TlsFiles(*files)
    return MirrorOptions(limit_bytes_per_s=limit, tls=tls, **options)


def _file(name: str, help: str) -> Callable[[F], F]:
    return click.option(name, type=click.Path(readable=False), metavar="FILE", help=help)


fetch_options = as_one(
    "fetching",
    _fetching,
    as_click(fast_mirror_args.DURABILITY),
    click.option(
        "--limit-rate",
        metavar="BYTES",
        help="Fetch at most BYTES per second, such as 500K or 10M, from all mirrors together.",
    ),
    as_click(fast_mirror_args.CONNECTIONS),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Only report what a run would do; DEST is not changed.",
    ),
    click.option(
        "--exit-unchanged",
        is_flag=True,
        help="Exit with status 6 if the run succeeded and changed nothing in DEST.",
    ),
    click.option(
        "--wait",
        "wait_s",
        is_flag=False,
        flag_value=3600,
        type=click.IntRange(0, 604_800),
        metavar="[SECONDS]",
        help="Wait for another run to DEST to end, at most SECONDS, or an hour; without it that is an error.",
    ),
    as_click(fast_mirror_args.DELETE),
    as_click(fast_mirror_args.FROM, metavar="URL"),
    _file("--ca", "Trust the authorities in FILE (PEM) instead of the system's."),
    _file("--client-cert", "Show this certificate (PEM) to the mirrors, and to no other host."),
    _file("--client-key", "The key of --client-cert, if it is not in the same file."),
    click.option(
        "--to-grid",
        is_flag=True,
        help="When all files exist, also store them in the grid, and print the cap for --from-grid.",
    ),
    check_options,
)
"""The options of every command that fetches."""


def _repeated(name: str, parameter: str, metavar: str, help: str) -> Callable[[F], F]:
    return click.option(name, parameter, multiple=True, metavar=metavar, help=help)


_by_name = all_of(
    _repeated(
        "--include", "include", "GLOB", "Only packages whose name matches, such as 'linux-*'."
    ),
    _repeated("--exclude", "exclude", "GLOB", "No packages whose name matches, such as '*-dbg'."),
    click.option(
        "--newest",
        type=click.IntRange(1, 1000),
        metavar="N",
        help="Only the N highest versions of each name and architecture.",
    ),
    click.option(
        "--delete-excluded",
        is_flag=True,
        help="Like --delete; also removes files that only filters of earlier runs select.",
    ),
    click.option(
        "--reindex",
        is_flag=True,
        help="Publish new indexes of the fetched files instead of the archive's own; needs --sign-with.",
    ),
    click.option(
        "--sign-with",
        metavar="KEY",
        help="Sign the new indexes with KEY: a file with a secret key, or its name in gpg's keyring.",
    ),
)
"""The filters by package name and version, and options for new indexes, for both kinds of archives."""

debian_filters = as_one(
    "filtering",
    dict,
    _by_name,
    _repeated("--section", "sections", "GLOB", "Only packages of this section, such as 'libs'."),
    _repeated("--priority", "priorities", "GLOB", "Only packages of this priority."),
    click.option("--sources", is_flag=True, help="Also the sources of the selected packages."),
)
"""The filters for packages of a Debian archive; see ``PackageFilter``."""

rpm_filters = as_one(
    "filtering",
    dict,
    _by_name,
    _repeated("--arch", "architectures", "GLOB", "Only packages of this architecture."),
    click.option(
        "--sources",
        is_flag=True,
        help="Also the source packages (src.rpm) of the selected packages.",
    ),
    click.option(
        "--gpgcheck",
        is_flag=True,
        help="Only packages that are signed by a key of --keyring. With --allow-unsigned the index need "
        "not be signed.",
    ),
)
"""The filters for packages of an RPM repository."""


def _signing_key(reindex: bool, sign_with: str | None) -> str | None:
    """
    Check the options for new indexes, and that the key can sign; return the key, or None if no index is made.
    """
    if reindex and not sign_with:
        raise usage_error("--reindex needs a key that signs the new indexes; give --sign-with KEY")
    if sign_with and not reindex:
        raise usage_error("--sign-with only signs new indexes; give --reindex as well")
    if sign_with:
        signatures.check_key(sign_with)
    return sign_with or None


def _set_filters(fetching: MirrorOptions, filtering: dict[str, Any]) -> None:
    fetching.delete_excluded = filtering.pop("delete_excluded")
    fetching.delete = fetching.delete or fetching.delete_excluded
    fetching.gpgcheck = filtering.pop("gpgcheck", False)
    fetching.sign_with = _signing_key(filtering.pop("reindex"), filtering.pop("sign_with"))
    fetching.filters = {name: value for name, value in filtering.items() if value} or None


# ``pipegrid mirror``: mirrors package archives from several mirrors at once.


@click.group(name="mirror", cls=CommandGroup)
@common_options
def mirror_command() -> None:
    """
    Mirror Debian archives, RPM repositories or lists of files from several mirrors at once.

    Many files are requested at a time, and hashed while they arrive; a file appears under its name only
    when its hash is right. Files that exist and are right are not requested, so an interrupted run
    continues where it stopped.
    """


@mirror_command.command(name="list")
@click.argument("file", type=click.Path(readable=False))
@click.argument("dest", type=click.Path(readable=False))
@as_click(fast_mirror_args.JOBS)
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

    FILE has one line per file: SHA-256 in hex, size in bytes and path, separated by spaces. The path is
    relative to each URL and to DEST, and may contain spaces.
    """
    _check_urls(fetching)

    return mirror_listed_files.list_job(file, dest, jobs, fetching)


@mirror_command.command(name="debian")
@click.argument("dest", type=click.Path(readable=False))
@as_click(fast_mirror_args.SUITE)
@as_click(fast_mirror_args.COMPONENT)
@as_click(fast_mirror_args.ARCHITECTURE)
@as_click(fast_mirror_args.SOURCE)
@keep_going_option
@keyring_option(f"Keys that may sign the release file.  [default: {DEBIAN_KEYRING}, if it exists]")
@from_grid_option
@unsigned_option
@as_click(fast_mirror_args.IGNORE_DATES)
@as_click(fast_mirror_args.INDEXES)
@as_click(fast_mirror_args.DIFFS)
@as_click(fast_mirror_args.ALSO, metavar="GLOB")
@debian_filters
@fetch_options
@common_options
@gathered("options", DebianOptions)
def debian_command(
    dest: str, options: DebianOptions, filtering: dict[str, Any], fetching: MirrorOptions
) -> ReactorJob | GridJob:
    """
    Mirror a Debian archive to DEST.

    gpgv checks each suite's release file; the hashes in it check the indexes, and those in the indexes
    check the packages. Indexes appear after the files that they name, so apt can use DEST during a run.
    """
    if options.from_grid is not None:
        return bring_back(options.from_grid, dest, fetching)
    _check_urls(fetching)
    if not options.suites:
        raise usage_error("give a suite, such as --suite sid")
    _check_keys(options)

    _set_filters(fetching, filtering)
    return debian_job(dest, options, fetching)


@mirror_command.command(name="rpm")
@click.argument("dest", type=click.Path(readable=False))
@as_click(fast_mirror_args.NEWEST_ONLY)
@keep_going_option
@keyring_option()
@from_grid_option
@unsigned_option
@click.option(
    "--metalink",
    metavar="URL",
    help="Use the mirrors of a metalink, and only a repomd.xml that it lists.",
)
@click.option(
    "--mirrorlist", metavar="URL", help="Use the mirrors of a list with one URL per line."
)
@rpm_filters
@fetch_options
@common_options
@gathered("options", RpmOptions)
def rpm_command(
    dest: str, options: RpmOptions, filtering: dict[str, Any], fetching: MirrorOptions
) -> ReactorJob | GridJob:
    """
    Mirror an RPM repository to DEST.

    URL is the directory that contains repodata. gpgv checks its repomd.xml; the hashes in it check the
    indexes, and those in the indexes check the packages. repomd.xml appears after all files that it names,
    so dnf can use DEST during a run.
    """
    if options.from_grid is not None:
        return bring_back(options.from_grid, dest, fetching)
    _check_keys(options, filtering["gpgcheck"])
    found = _take_lists(fetching, options)
    _check_urls(fetching)

    _set_filters(fetching, filtering)
    return rpm_job(dest, options, fetching, found)


def _check_keys(options: DebianOptions | RpmOptions, gpgcheck: bool = False) -> None:
    if gpgcheck and not options.keyrings:
        raise usage_error("--gpgcheck needs the keys that may sign; give --keyring FILE")
    if options.allow_unsigned and options.keyrings and not gpgcheck:
        raise usage_error("with --allow-unsigned no --keyring is used; give one of them")


def _check_urls(fetching: MirrorOptions) -> None:
    if not fetching.urls:
        raise usage_error("no mirror is named; give --from URL")
    if any(url.startswith("mirror") for url in fetching.urls):
        found = [each for url in fetching.urls for each in mirror_lists.expanded(url, fetching.tls)]
        fetching.urls = tuple(dict.fromkeys(found))


def _take_lists(fetching: MirrorOptions, options: RpmOptions) -> mirror_lists.Metalink | None:
    """
    Add the mirrors of ``--metalink`` and ``--mirrorlist`` to the given mirrors; return the metalink, if any.
    """
    found, metalink, mirrorlist = None, options.metalink, options.mirrorlist
    urls = list(fetching.urls)
    if metalink is not None:
        found = mirror_lists.read_metalink(
            mirror_lists.fetched_list(metalink, fetching.tls), redirects.shown_url(metalink)
        )
        urls += found.urls
    if mirrorlist is not None:
        urls += mirror_lists.read_mirror_list(
            mirror_lists.fetched_list(mirrorlist, fetching.tls), redirects.shown_url(mirrorlist)
        )
    fetching.urls = tuple(dict.fromkeys(urls))
    return found


def bring_back(cap: str, dest: str, fetching: MirrorOptions) -> GridJob:
    """Return the job that fetches a mirror from the grid."""
    if fetching.urls or fetching.to_grid:
        raise usage_error("--from-grid cannot be combined with --from or --to-grid; leave them out")
    cap_list_files.check_no_file(cap)
    fetching.check_deleting(dest)

    async def work(reactor: Any, grid: Grid, console: Console) -> int:

        async with fetching.mirror(reactor, console, dest) as (mirror, display):
            fetch = archive_from_grid.GridFetch(mirror, grid, cap, debian_archive.names_by_hash)
            removed = await fetch.fetch(fetching.delete, fetching.dry_run, display.show)
        changes = mirror.destination.changes
        return print_outcome(console, fetching, dest, fetch.report, removed, changes)

    return ReactorGridJob(work, cap)


@mirror_command.command(name="verify")
@click.argument("dest", type=click.Path(exists=True, file_okay=False))
@check_options
@common_options
def verify_command(dest: str, sample: float, paranoid: bool) -> OfflineJob:
    """
    Verify that every file of the last complete run is in DEST, and right.

    A file that was hashed before and has not changed since is not read again.
    """

    return mirror_verify.verify_job(dest, paranoid, sample / 100)


# ``pipegrid pdiff``: updates an index by patches.


@click.command(name="pdiff")
@click.argument("index", type=click.Path(readable=False))
@click.argument(
    "patches", nargs=-1, required=True, type=click.Path(readable=False), metavar="PATCH..."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(readable=False),
    metavar="OUT",
    help="Where the result goes.",
)
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@click.option(
    "--sha256", metavar="HEX", help="The SHA-256 of the result; if it differs, OUT is not written."
)
@common_options
def pdiff_command(
    index: str, patches: tuple[str, ...], output: str, force: bool, sha256: str | None
) -> OfflineJob:
    """
    Apply the PATCHes, oldest first, to INDEX, and write the result to OUT.

    Patches are ed scripts, as in Debian's archive. INDEX is read once, however many patches there are.
    Packed files (gzip, xz, bzip2, zstandard) are unpacked; OUT is not packed. Prints SHA-256, size and name
    of the result.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise usage_error("--sha256 takes 64 hexadecimal digits")

    def work(console: Console) -> int:
        with output_file.OutputFile(output, force) as out:
            try:
                patched = pdiff.apply_patches(index, patches, out.file.fileno())
            except OSError as error:
                if error.filename is not None:  # an input file's error, which names the file
                    raise
                raise SinkError(
                    f"cannot write {output}: {error.strerror}; free some space or choose another place"
                ) from error
            found = patched.digest.hex()
            if sha256 is not None and found != sha256.lower():
                raise decompression.PatchError(
                    f"the result has another SHA-256, {found}: a patch is damaged, missing, or not for "
                    f"{index}; fetch the index again"
                )
        console.result(
            f"{found}  {patched.size_bytes}  {output}",
            {"path": output, "size": patched.size_bytes, "sha256": found},
        )
        return ExitStatus.DONE

    return OfflineJob(work)

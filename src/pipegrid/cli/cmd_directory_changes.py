"""``pipegrid cp``, ``ln``, ``mkdir``, ``mv`` and ``rm``: commands that change directories."""

from __future__ import annotations

import click

from pipegrid.cli import cap_lookup, copy_transfers, destination_child
from pipegrid.cli.cap_list_files import print_cap
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    EMPTY_NAME,
    any_path,
    format_option,
    grid_options,
    grid_path,
    limit_options,
    read_only_option,
    usage_error,
)
from pipegrid.core.text import printable
from pipegrid.errors import NoSuchChild, UsageError
from pipegrid.tree import directory, tree_grid

# ``pipegrid cp``: copies to a grid, from a grid and within a grid.


@click.command(name="cp")
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    metavar="SOURCE... TARGET",
    type=click.Path(readable=False),
    shell_complete=any_path,
)
@click.option(
    "-r", "--recursive", is_flag=True, help="Also copy directories, with everything in them."
)
@click.option("-f", "--force", is_flag=True, help="Replace existing files.")
@limit_options
@grid_options
def cp_command(arguments: tuple[str, ...], recursive: bool, force: bool) -> GridJob:
    """
    Copy files and directories to a grid, from it, or within it.

    Each argument is a local path, or a place on the grid: ALIAS:some/path, CAP or CAP/some/path. If TARGET
    is an existing directory, each SOURCE goes into it and keeps its name; a directory given by its cap or
    alias alone has no name, so its entries are copied. Several SOURCEs, or a directory, need a directory as
    TARGET; it is created if it is missing, with those above it.

    Within a grid, immutable files and directories are linked, and no byte moves. Mutable ones are copied as
    they are now, into immutable ones; 'ln' gives the original another name. At the target, a mutable file
    of the same name is overwritten and keeps its cap, the entries of a copied directory are added to a
    mutable directory of the same name, and anything else is replaced only with -f.
    """
    if len(arguments) < 2:
        raise usage_error("give a source and a target")
    if any(not each.strip() for each in arguments):
        raise usage_error(EMPTY_NAME)
    if "-" in arguments:
        raise usage_error("standard input and output are for 'put' and 'cat'; cp copies files")

    *sources, target = arguments
    on_grid = [destination_child.is_on_grid(source) for source in sources]
    to_grid = destination_child.is_on_grid(target)
    if not (to_grid or all(on_grid)):
        if meant := next(filter(None, map(destination_child.alias_in, arguments)), ""):
            raise usage_error(f"there is no file '{meant[:-1]}'; did you mean '{meant}'?")
        raise usage_error(
            f"'{printable(sources[on_grid.index(False)])}' and the target are both local files; one of them "
            "has to be on the grid: ALIAS:some/path or CAP/some/path"
        )

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        if to_grid:
            given = list(zip(sources, on_grid, strict=True))
            return await copy_transfers.store_copies(grid, console, given, target, recursive, force)
        return await copy_transfers.fetch_copies(grid, console, sources, target, recursive, force)

    return GridJob(work, *arguments)


# ``pipegrid ln``: gives objects another name.


@click.command(name="ln")
@click.argument(
    "sources", nargs=-1, required=True, metavar="CAP[/PATH]...", shell_complete=grid_path
)
@click.argument("path", metavar="PATH", shell_complete=grid_path)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Replace an object of this name, except a mutable directory.",
)
@grid_options
def ln_command(sources: tuple[str, ...], path: str, force: bool) -> GridJob:
    """
    Link files or directories into a mutable directory.

    The last PATH is the new name: ALIAS:some/name or CAP/some/name. If it is an existing directory, a source
    that was given with a path is linked in it under its old name. Missing directories are created. Several
    sources need an existing directory.
    """

    async def link(grid: tree_grid.Grid, console: Console, source: str) -> None:
        root, names = await cap_lookup.root_of(grid, source)
        way = await directory.look_up(grid, root, names)
        if len(way) <= len(names):
            name = names[len(way) - 1]
            raise NoSuchChild(
                f"there is no '{cap_lookup.shown_path([name])}' to link; check the path", name
            )
        spot = await destination_child.spot_at(grid, path, names[-1] if names else None, make=True)
        spot.check_free(force, way[-1].cap)
        await (await spot.reach()).change([directory.link_of(way[-1], spot.name, force)])
        console.json_result({"name": spot.name, "cap": str(way[-1].cap)})

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        await destination_child.check_takes(grid, path, sources)
        return await cap_lookup.each_argument(grid, console, sources, link)

    return GridJob(work, *sources, path)


# ``pipegrid mkdir``: makes mutable directories.


@click.command(name="mkdir")
@click.argument("paths", nargs=-1, metavar="[PATH...]", shell_complete=grid_path)
@format_option
@read_only_option
@grid_options
def mkdir_command(paths: tuple[str, ...], format: str | None, read_only: bool) -> GridJob:
    """
    Make mutable directories, and print their write caps.

    With PATH, ALIAS:some/path or CAP/some/path, the directory is linked there, and missing directories are
    created. If it exists already, its cap is printed.
    """
    if read_only and not paths:
        raise usage_error(
            "--read-only needs a PATH; without one the write cap of the directory would be lost"
        )

    async def make(grid: tree_grid.Grid, console: Console, path: str | None) -> None:
        if path is None:
            made = await grid.create_directory(format=format)
        else:
            root, names = await cap_lookup.root_of(grid, path)
            made = await directory.make_directories(grid, root, names, format)
        cap = made.cap
        read_cap = str(cap.readonly())
        fields = {"read_cap": read_cap} if read_only else {"cap": str(cap), "read_cap": read_cap}
        shown = read_cap if read_only else str(cap)
        print_cap(console, grid.config.directory, shown, fields, str(cap), path or "")

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        if paths:
            return await cap_lookup.each_argument(grid, console, paths, make)
        await make(grid, console, None)
        return ExitStatus.DONE

    return GridJob(work, *(paths or ("",)))


# ``pipegrid mv``: gives entries another name, or moves them to another directory.


@click.command(name="mv")
@click.argument("sources", nargs=-1, required=True, metavar="PATH...", shell_complete=grid_path)
@click.argument("path", metavar="PATH", shell_complete=grid_path)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Replace an object of the new name, except a mutable directory.",
)
@grid_options
def mv_command(sources: tuple[str, ...], path: str, force: bool) -> GridJob:
    """
    Rename or move files or directories; their metadata moves with them.

    Each PATH is ALIAS:some/name or CAP/some/name. If the last is an existing directory, the name is kept in
    it; missing directories are created. Several sources need an existing directory. An entry is linked in
    the new directory before it is removed from the old one, so that nothing is lost if the command is
    interrupted; the same command finishes the move.
    """

    async def move_one(grid: tree_grid.Grid, console: Console, source: str) -> None:
        old = await destination_child.spot_at(grid, source)
        if old.there is None:
            raise destination_child.missing(old)
        new = await destination_child.spot_at(grid, path, old.name, make=True)
        if (
            new.directory.cap == old.there.cap
            and not new.missing
            and (await cap_lookup.root_of(grid, path))[1]
        ):
            # The target is the directory that is moved: an interrupted command has linked it there already.
            new = await destination_child.spot_at(grid, path)
        if old.there.cap is not None and old.there.cap in new.path_caps:
            raise UsageError(
                "a directory cannot be moved into itself, since no path would lead to it"
            )
        if new.missing or (old.directory.cap, old.name) != (new.directory.cap, new.name):
            if old.directory.cap == new.directory.cap or not directory.is_same(
                old.there, new.there
            ):
                new.check_free(force, old.there.cap)
            await directory.move(old.directory, old.name, await new.reach(), new.name, force)
        console.json_result({"name": new.name, "cap": str(old.there.cap)})

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        await destination_child.check_takes(grid, path, sources)
        return await cap_lookup.each_argument(grid, console, sources, move_one)

    return GridJob(work, *sources, path)


# ``pipegrid rm``: removes names from directories.


@click.command(name="rm")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=grid_path)
@click.option(
    "-r", "--recursive", is_flag=True, help="Also remove directories, with everything in them."
)
@grid_options
def rm_command(paths: tuple[str, ...], recursive: bool) -> GridJob:
    """
    Remove files or directories from their directories.

    Each PATH is ALIAS:some/name or CAP/some/name. A client that has the cap of what was removed can read it
    until its leases end.
    """

    async def remove(grid: tree_grid.Grid, console: Console, path: str) -> None:
        spot = await destination_child.spot_at(grid, path)
        if spot.there is None:
            raise destination_child.missing(spot)
        if spot.there.kind == "directory" and not recursive:
            raise UsageError(
                f"'{printable(spot.name)}' is a directory, and its cap may be stored nowhere else; add -r "
                "to remove it with everything below"
            )
        if not await spot.directory.unlink_same(spot.name, spot.there):
            raise UsageError(
                f"another client replaced '{printable(spot.name)}' meanwhile, so it was not removed; look "
                "at it again"
            )
        console.json_result({"name": spot.name, "cap": str(spot.there.cap)})

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        return await cap_lookup.each_argument(grid, console, paths, remove)

    return GridJob(work, *paths)

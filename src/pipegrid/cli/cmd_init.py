"""``pipegrid init``: makes a client's directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from pipegrid.cli.command_job import Invocation, OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.options import (
    Encoding,
    choose_params,
    encoding_options,
    gathered,
    given,
    happy_option,
    init_options,
)
from pipegrid.core import encoding_parameters
from pipegrid.core.text import counted, decode_text
from pipegrid.errors import UsageError
from pipegrid.grid import client_config, client_creation, client_paths, servers_and_introducers_yaml
from pipegrid.wire import server_address


class GridChoice(NamedTuple):
    """The options that choose a grid, as they were given."""

    local: bool
    servers: str | None
    introducer_furls: tuple[str, ...]
    node: str | None
    addresses: tuple[str, ...]

    @property
    def is_given(self) -> bool:
        """Whether any of the options was given."""
        return self != (False, None, (), None, ())


@click.command(name="init")
@click.argument("addresses", nargs=-1, metavar="[NURL|FURL|FILE]...")
@click.option(
    "--local",
    is_flag=True,
    help="Make a grid on this machine, even if servers.yaml names servers.",
)
@click.option(
    "--servers",
    metavar="N|FILE",
    help="How many storage directories the local grid has, 10 by default; or a file of servers: a "
    "servers.yaml, or NURLs and fURLs, one per line.",
)
@click.option(
    "--introducer",
    "introducer_furls",
    multiple=True,
    metavar="FURL",
    help="An introducer of a grid, which names the servers; can be given several times.",
)
@click.option(
    "--tahoe",
    "node",
    type=click.Path(file_okay=False, readable=False),
    metavar="NODEDIR",
    help="A Tahoe-LAFS node's directory to copy all settings from; it is only read.",
)
@encoding_options
@happy_option
@init_options
@click.pass_obj
@gathered("wanted", GridChoice)
def init_command(
    invocation: Invocation, wanted: GridChoice, encoding: Encoding, happy: int | None
) -> OfflineJob:
    """
    Make the client's directory, with a new grid on this machine, or for an existing one.

    For existing servers, give what 'pipegrid serve' prints: NURLs and fURLs, or a file with one per line,
    or a servers.yaml. If the directory has a private/servers.yaml or private/introducers.yaml, these
    files say which servers are the grid instead.

    If the first command has made a grid on this machine by itself, it is moved to make space for another
    grid; 'pipegrid --local' reaches it.

    The numbers become the defaults of later uploads. By default there is a share for each server, up to
    ten, and about a third of them restore a file; the numbers chosen are printed. In an existing directory,
    -k, -n, --happy and --segment-size change them.
    """
    return OfflineJob(lambda console: _make(console, invocation.directory, wanted, encoding, happy))


def _make(
    console: Console, named: str | None, wanted: GridChoice, encoding: Encoding, happy: int | None
) -> int:
    """Make or change a client's directory, and report the result."""
    if wanted.local + (wanted.node is not None) + bool(wanted.introducer_furls) > 1:
        raise UsageError("choose one of --local, --introducer and --tahoe")
    count, servers_file = _count_or_file(wanted.servers)
    if servers_file is not None and (wanted.local or wanted.node is not None):
        raise UsageError("--local, --tahoe and --servers FILE each name the servers; give only one")
    if wanted.addresses and (wanted.local or wanted.node is not None or wanted.servers is not None):
        raise UsageError(
            "the servers are given as arguments, so --local, --tahoe and --servers FILE cannot be; leave "
            "one out"
        )
    directory = Path(named or client_paths.default_directory())
    said = given(encoding)
    if (
        (said or happy is not None)
        and not wanted.is_given
        and client_paths.is_configured(directory)
    ):
        config = client_creation.change(directory, said, happy)
    elif wanted.node is not None:
        params = choose_params(client_config.load(wanted.node).params, encoding) if said else None
        config = client_creation.create_like_tahoe(
            directory, wanted.node, params=params, happy=happy, moved=partial(print_moved, console)
        )
    else:
        config = _create(console, directory, wanted, count, servers_file, encoding, happy)
    print_created(console, config)
    return 0


def print_moved(console: Console, place: Path) -> None:
    """Report where the previous grid was moved."""
    is_own = place == client_paths.aside_of(client_paths.default_directory())
    how = "pipegrid --local" if is_own else f"pipegrid -d {place}"
    console.note(f"the grid on this machine was moved to {place}; '{how}' reaches it")


def _create(
    console: Console,
    directory: Path,
    wanted: GridChoice,
    count: int,
    servers_file: str | None,
    encoding: Encoding,
    happy: int | None,
) -> client_config.GridConfig:
    """Make a client's directory for existing servers, or with a local grid."""
    files: dict[str, str] = {}
    number: int | None = count
    makes_local = False
    if servers_file is not None or wanted.introducer_furls or wanted.addresses:
        sources = wanted.addresses or (() if servers_file is None else (servers_file,))
        files, number = _files(sources, wanted.introducer_furls)
    elif not wanted.local and (named := _named_servers(directory)) != 0:
        number = named
    else:
        makes_local = True
    suggestion, enough = (
        (encoding_parameters.Params(), None)
        if number is None
        else client_creation.suggested(number)
    )
    params = _fitting(suggestion, encoding)
    if enough is not None:
        enough = min(enough, params.total_shares)
    if happy is not None:
        enough = happy
    if makes_local:
        return client_creation.create_local(directory, servers=count, params=params, happy=enough)
    return client_creation.create_client(
        directory,
        params=params,
        happy=enough,
        files=files,
        moved=partial(print_moved, console) if files else None,
    )


def print_created(console: Console, config: client_config.GridConfig, **more: Any) -> None:
    """
    Report a new client's directory, and the encoding that it uses.

    Args:
        more: further fields of the JSON result.
    """
    for warning in config.warnings:
        console.note(warning)

    if crowded := encoding_parameters.too_many_shares(
        config.params.total_shares, client_creation.known_servers(config) or 0
    ):
        console.note(crowded)
    console.note(numbers_of(config))
    console.result(
        str(config.directory),
        {
            "directory": str(config.directory),
            "servers": len(config.static.servers) if config.local is None else config.local.servers,
            "introducers": len(config.introducers.addresses),
            "required_shares": config.params.required_shares,
            "total_shares": config.params.total_shares,
            "happy": config.happy,
            **more,
        },
    )


def _fitting(
    suggestion: encoding_parameters.Params, encoding: Encoding
) -> encoding_parameters.Params:
    """Return encoding parameters: the given values, and for the others values that fit those."""
    required, total = encoding["required_shares"], encoding["total_shares"]
    if total is not None and required is None:
        required = min(suggestion.required_shares, total)
    if required is not None and total is None:
        total = max(suggestion.total_shares, required)
    return choose_params(
        suggestion, {**encoding, "required_shares": required, "total_shares": total}
    )


def numbers_of(config: client_config.GridConfig) -> str:
    """Return a sentence that explains the encoding and how many servers an upload needs."""
    params, servers = config.params, client_creation.listed_servers(config)
    shares = counted(params.total_shares, "share")
    if servers is None:
        needed = counted(config.happy, "server")
    else:
        needed = f"{config.happy} of the {counted(servers, 'server')}"
    return (
        f"any {params.required_shares} of {shares} restore a file, and an upload needs {needed}; "
        "'init -k K -n N --happy H' changes that"
    )


def _count_or_file(servers: str | None) -> tuple[int, str | None]:
    """Return how many storage directories to make, and the file of servers if one was given."""
    if servers is None:
        return 10, None
    if not (servers.isascii() and servers.isdigit()):
        return 10, servers
    if len(servers) > 4 or not 1 <= int(servers) <= 256:
        raise UsageError(f"a local grid has 1 to 256 servers, not {servers}")
    return int(servers), None


def _named_servers(directory: Path) -> int | None:
    """
    Return how many servers the directory's files name; 0 without files; None if introducers name the servers.
    """
    static = servers_and_introducers_yaml.load_static_servers(directory)
    if servers_and_introducers_yaml.load_introducers(directory).addresses:
        return None
    if not static.servers and static.warnings:  # otherwise a local grid would replace this grid
        raise UsageError(
            f"{directory} names no servers that can be used ({static.warnings[0]}); correct that, or add "
            "--local"
        )
    return len(static.servers)


def _files(
    sources: tuple[str, ...], introducer_furls: tuple[str, ...]
) -> tuple[dict[str, str], int | None]:
    """
    Return the files of the new directory, checked before anything is made, and how many servers they name.

    The number is None if introducers name the servers.

    Args:
        sources: addresses of servers, and paths of files that contain addresses.
    """
    files = {}
    number = None
    if sources:
        files[client_paths.SERVERS_NAME], number = _servers_file(sources)
    if introducer_furls:
        addresses = []
        for number, text in enumerate(introducer_furls, 1):
            name = "default" if len(introducer_furls) == 1 else f"introducer-{number}"
            try:
                addresses.append(
                    servers_and_introducers_yaml.IntroducerAddress(
                        name, server_address.parse_furl(text.strip())
                    )
                )
            except UsageError as error:
                raise UsageError(f"--introducer: {error}") from None
        files[client_paths.INTRODUCERS_NAME] = servers_and_introducers_yaml.Introducers(
            tuple(addresses)
        ).as_text()
        number = None
    return files, number


def _servers_file(sources: tuple[str, ...]) -> tuple[str, int]:
    """
    Return the text of a ``servers.yaml`` with the servers of these sources, and how many servers it has.
    """
    import json

    addresses: list[tuple[str, str]] = []
    text, name = "", "the command line"
    for number, source in enumerate(sources, 1):
        if servers_and_introducers_yaml.is_address(source):
            addresses.append((f"address {number}", source.strip()))
            continue
        data = servers_and_introducers_yaml.read_bounded(Path(source))
        if data is None:
            raise UsageError(
                f"{source} does not exist; give NURLs or fURLs as 'pipegrid serve' prints them, a file with "
                "one per line, or a file in the format of servers.yaml"
            )
        content = decode_text(data, source)
        found = servers_and_introducers_yaml.addresses_of(content, source)
        if found is not None:
            addresses += found
        elif len(sources) > 1:
            raise UsageError(
                f"{source} is not a list of addresses; a file in the format of servers.yaml is given alone"
            )
        else:
            text, name = content, source
    text = text or json.dumps(servers_and_introducers_yaml.servers_of(addresses), indent=2) + "\n"
    servers = servers_and_introducers_yaml.parse_static_servers(text.encode("utf-8"), name)
    if not servers.servers:
        because = "".join(f" ({warning})" for warning in servers.warnings[:1])
        raise UsageError(f"{name} names no servers that can be used{because}")
    return text, len(servers.servers)

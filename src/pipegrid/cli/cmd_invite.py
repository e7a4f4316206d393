"""``pipegrid invite``: prints a code with which another client or server joins the grid."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cmd_join
from pipegrid.cli.command_job import GridJob, Invocation, OpenGrid
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    RELAY_URL,
    common_options,
    gathered,
    grid_path,
    kept_duration,
    relay_option,
)
from pipegrid.core import caps
from pipegrid.core.text import as_pasted, counted, printable
from pipegrid.errors import CapError, InvitationError, PipegridError, UsageError
from pipegrid.grid import (
    client_config,
    client_paths,
    invitation_messages,
    invite_and_join,
    wormhole_exchange,
)
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from pipegrid.tree import grid_paths
from pipegrid.tree.backup import run_paths

if TYPE_CHECKING:
    from pipegrid.grid.invitation_messages import Invitation
    from pipegrid.grid.wormhole_exchange import Relay
    from pipegrid.wire.announcements import KnownServer

ADVICE = "run 'pipegrid invite' again for a new one"


class InviteOptions(NamedTuple):
    """The options of ``invite``; see their declarations."""

    paths: tuple[str, ...]
    read_only: bool
    listen: str | None
    expires_s: int
    relay_url: str


@click.command(name="invite")
@click.argument("paths", nargs=-1, metavar="[CAP|ALIAS:PATH]...", shell_complete=grid_path)
@click.option(
    "--read-only", is_flag=True, help="Share the directories for reading only, by their read caps."
)
@click.option(
    "--listen",
    metavar="[HOST:]PORT",
    help="Be the relay, too, for a network without one; HOST is this machine's address for others.",
)
@click.option(
    "--expires",
    "expires_s",
    type=kept_duration,
    default="1 hour",
    show_default=True,
    metavar="TIME",
    help="How long the code is valid, such as '10 minutes'.",
)
@relay_option
@common_options
@gathered("options", InviteOptions)
def invite_command(options: InviteOptions) -> GridJob:
    """
    Print a code with which one other person, or one server, joins your grid.

    They run 'pipegrid join CODE', 'pipegrid serve --join CODE' or 'tahoe create-client --join CODE'. The code
    leads to the grid's servers, introducers and numbers, and to the directories named here, which become
    aliases. It is valid once, while this command runs, and only until it is entered wrongly once. A server
    that joins is added to your servers, unless an introducer names them.
    """
    invitation_messages.checked_relay(options.relay_url)
    if options.listen is not None:
        host_and_port(options.listen)
    return InviteJob(options)


def host_and_port(text: str) -> tuple[str, int]:
    """
    Return the host and the port at which a relay listens, from ``HOST:PORT`` or a port.

    If no host is given, return this machine's name.

    Raises:
        UsageError: the text is neither ``HOST:PORT`` nor a port.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = all(each.isalnum() or each in "-._:" for each in host) and host.isascii()
    if not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536 and is_host):
        raise UsageError(
            f"--listen {printable(text[:60])!r} is neither PORT nor HOST:PORT; correct it"
        )
    return host or socket.gethostname(), int(port)


class InviteJob(GridJob):
    """A job that invites one other client; it opens a grid only to look up paths."""

    asks_servers = False

    def __init__(self, options: InviteOptions) -> None:
        self._options = options
        self._added: list[KnownServer] = []
        self._problem: PipegridError | None = None

    async def _run(self, invocation: Invocation, reactor: Any, open_grid: OpenGrid) -> int:
        cmd_join.load_library()
        console, options = invocation.console, self._options
        directory = invocation.grid_directory
        if (changed := invite_and_join.include_own_server(directory)) is not None:
            console.note(changed)
        shared = await self._shared(directory, reactor, open_grid)
        offered = invite_and_join.invitation_of(directory, shared)
        offered.as_message()  # refuses an invitation that is too large
        if near := invite_and_join.unreachable_servers(offered.servers):
            console.note(
                f"only this machine reaches {printable(', '.join(near))}; for others start such a "
                "server with --location HOST:PORT"
            )
        policy, _ = client_config.connections_of(directory)
        if policy.hides_address and options.listen is not None:
            raise UsageError(
                "--listen reveals this machine's address, and [node] reveal-IP-address is false; use a relay"
            )
        relay, relay_url, told_url = await _relay(reactor, options)
        if relay is not None:  # a proxy cannot reach a relay on this machine
            policy = DIRECT_CONNECTIONS
        try:
            exchange = wormhole_exchange.WormholeExchange(reactor, relay_url, ADVICE, policy)
            try:
                code = await exchange.new_code()
                self._print_code(console, code, told_url, offered)
                ours, reply = await wormhole_exchange.invite(
                    exchange,
                    offered,
                    options.expires_s,
                    lambda server: self._add(directory, server),
                )
            finally:
                await exchange.close()
        finally:
            if relay is not None:
                await relay.stop()
        return self._print_outcome(console, directory, offered, ours, reply)

    async def _shared(
        self, directory: Path, reactor: Any, open_grid: OpenGrid
    ) -> dict[str, caps.DirectoryCap]:
        """
        Return the directories to share, by their names.

        Raises:
            UsageError, CapError: a path does not lead to a directory.
        """
        found: dict[str, caps.DirectoryCap] = {}
        grid = None
        try:
            for text in self._options.paths:
                run = run_paths.run_path_here(text, directory) if "@" in text else None
                root, names = ("", run.names) if run else grid_paths.parse_here(text, directory)
                if grid is None and (run or names):
                    grid = await open_grid(reactor, str(directory))
                if run and grid is not None:
                    root, _ = await run_paths.RunFinder(grid).root_of(text)
                cap: Any = caps.as_cap(root)
                if names and grid is not None:
                    place = await grid_paths.resolve(grid, root, names)
                    cap = place.best or place.cap
                name = names[-1] if names else run.name if run else _alias_in(text)
                found[cmd_join.unused_alias(name, found)] = self._checked(cap)
        finally:
            if grid is not None:
                await grid.close()
        return found

    def _checked(self, cap: Any) -> caps.DirectoryCap:
        if not isinstance(cap, caps.DirectoryCap):
            raise CapError(
                "an invitation shares directories, as aliases stand for those; put the file into one with "
                "'pipegrid cp', and share that"
            )
        return cap.readonly() if self._options.read_only else cap

    def _print_code(
        self, console: Console, code: str, relay_url: str | None, offered: Invitation
    ) -> None:
        how = "join" if relay_url is None else f"join --relay-url {relay_url}"
        console.note(
            f"valid once, for {self._options.expires_s // 60} minutes, while this command runs; "
            f"the other person runs: pipegrid {how} {code}"
        )
        for name, cap in offered.caps.items():
            grants = "read" if cap.readonly() == cap else "read and change"
            console.note(f"who joins can {grants} '{printable(name)}'")
        console.result(code, {"code": code, "relay_url": relay_url or self._options.relay_url})

    def _add(self, directory: Path, server: KnownServer) -> invitation_messages.AddReply:
        """Add the server of the client that joins to the list of servers in a directory."""
        try:
            self._added += invite_and_join.add_servers(directory, [server])
        except PipegridError as error:
            self._problem = error
        numbers = invite_and_join.numbers_of(client_config.load(directory))
        return invitation_messages.AddReply(self._problem is None, numbers)

    def _print_outcome(
        self,
        console: Console,
        directory: Path,
        offered: Invitation,
        ours: bool,
        reply: invitation_messages.JoinReply | None,
    ) -> int:
        if self._problem is not None:
            raise self._problem
        for server in self._added:
            console.note(
                f"added the server {printable(server.identity.nickname)} to "
                f"{directory / client_paths.SERVERS_NAME}"
            )
        if not ours and not offered.introducers:
            raise InvitationError(
                "Tahoe-LAFS has joined, but finds servers through introducers only, and this grid has none; "
                f"give it a copy of {directory / client_paths.SERVERS_NAME}"
            )
        if not ours and offered.caps:
            console.note(
                "Tahoe-LAFS takes no caps from an invitation; send the "
                f"{counted(len(offered.caps), 'cap')} another way"
            )
        if reply is not None and not reply.joined:
            raise InvitationError(f"the other end did not join; {ADVICE}")
        console.note("the other end has joined" if ours else "Tahoe-LAFS has joined")
        console.json_result(
            {
                "client": "pipegrid" if ours else "tahoe-lafs",
                "joined": True,
                "servers_added": [each.identity.server_id for each in self._added],
            }
        )
        return ExitStatus.DONE


async def _relay(reactor: Any, options: InviteOptions) -> tuple[Relay | None, str, str | None]:
    """
    Return the relay if one was started here, the relay's address for this process, and its address for the
    other person.

    The last address is None if it is the default one.
    """
    if options.listen is None:
        is_usual = options.relay_url == RELAY_URL
        return None, options.relay_url, None if is_usual else options.relay_url
    host, port = host_and_port(options.listen)
    try:
        interface = str(ipaddress.ip_address(host))
    except ValueError:
        interface = ""
    relay = await wormhole_exchange.start_relay(reactor, host, port, interface)
    return relay, relay.url_here, relay.url


def _alias_in(text: str) -> str:
    """Return the alias at the beginning of a path; for a cap, return ``UNNAMED``."""
    text = as_pasted(text)
    alias, _, _ = text.partition(":")
    return cmd_join.UNNAMED if text.startswith("URI:") or alias in ("ro.URI", "imm.URI") else alias

"""``pipegrid join``: makes a client of the grid that an invitation's code leads to."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cmd_init
from pipegrid.cli.command_job import Invocation, ReactorJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import common_options, relay_option
from pipegrid.cli.startup import lazy_modules
from pipegrid.core.text import counted, printable
from pipegrid.errors import InvitationError, UsageError
from pipegrid.grid import (
    client_config,
    client_creation,
    client_paths,
    invitation_messages,
    invite_and_join,
    user_grids,
    wormhole_exchange,
)
from pipegrid.tree import aliases

if TYPE_CHECKING:
    from pipegrid.core.caps import DirectoryCap
    from pipegrid.grid.client_config import GridConfig
    from pipegrid.grid.invitation_messages import Invitation
    from pipegrid.server.serve import StorageNode

ADVICE = "ask for a new code"
UNNAMED = "shared"
"""The alias for a directory whose name in the invitation cannot be an alias."""


class JoinPlace(NamedTuple):
    """
    The directory with which a client joins a grid.

    Attributes:
        own: the user's own directory.
        directory: the directory for the grid.
        name: the name of the grid in ``own``, or None.
    """

    own: Path
    directory: Path
    name: str | None


@click.command(name="join")
@click.argument("code", metavar="CODE")
@relay_option
@common_options
@click.pass_obj
def join_command(invocation: Invocation, code: str, relay_url: str) -> ReactorJob:
    """
    Join the grid that CODE leads to, which 'pipegrid invite' or 'tahoe invite' printed.

    The grid's servers, introducers and numbers become those of the client's directory; shared directories
    become aliases. Nothing that exists is replaced: of the grid that the directory uses already, new servers
    are added; another grid is added under a name, as 'pipegrid --grid NAME join CODE' says it or as you are
    asked. A grid on this machine that the first command made by itself is moved; 'pipegrid --local' reaches
    it.
    """
    code = invitation_messages.checked_code(code)
    relay_url = invitation_messages.checked_relay(relay_url)
    place = place_to_join(invocation.own_directory, invocation.grid, _ask_name)
    # How to connect to the relay; a new directory has no such settings, so the user's own are used.
    is_there = client_paths.is_configured(place.directory)
    policy, _ = client_config.connections_of(place.directory if is_there else place.own)

    async def work(reactor: Any, console: Console) -> int:
        load_library()
        exchange = wormhole_exchange.WormholeExchange(reactor, relay_url, ADVICE, policy)
        try:
            taken, answers = await wormhole_exchange.take(exchange, code)
            joined = False
            try:
                config, names = join(console, place, taken)
                joined = True
            finally:
                if answers:
                    exchange.send(invitation_messages.JoinReply(joined).as_message())
        finally:
            await exchange.close()
        more = {} if place.name is None else {"grid": place.name}
        cmd_init.print_created(console, config, aliases=names, **more)
        return ExitStatus.DONE

    return ReactorJob(work)


def load_library() -> None:
    """
    Import the modules that exchange invitations.

    Raises:
        UsageError: the library that they need is not installed.
    """
    lazy_modules.bring_in_extra("invitations need", "invite", wormhole_exchange)


def place_to_join(own: Path, name: str | None, ask: Any) -> JoinPlace:
    """
    Return the directory for a grid, before its code is used.

    Args:
        own: the user's own directory.
        name: the name that was given for the grid, or None.
        ask: called if ``own`` has another grid already; returns the name of a second grid, or None.

    Raises:
        UsageError: the directory cannot be configured.
    """
    invite_and_join.check_can_join(own)
    is_free = not client_paths.is_configured(own) or client_creation.is_automatic(own)
    if name is not None:
        name = user_grids.checked_grid_name(name)
    if is_free:
        return JoinPlace(own, own, name)
    if name is None:
        name = ask(own)
    if name is None:
        return JoinPlace(own, own, None)
    known = user_grids.grids_of(own).get(name)
    place = user_grids.place_for_grid(own, name) if known is None else known
    invite_and_join.check_can_join(place)
    return JoinPlace(own, place, name)


def _ask_name(own: Path) -> str | None:
    """
    Ask on a terminal for the name of a second grid; None: there is no terminal, or the code is for the grid
    in use.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    text = click.prompt(
        f"{own} uses a grid already. To add another one, give it a name; leave it empty if the code is for "
        "the same grid",
        default="",
        show_default=False,
        err=True,
    )
    return user_grids.checked_grid_name(text.strip()) if text.strip() else None


def join(console: Console, place: JoinPlace, taken: Invitation) -> tuple[GridConfig, list[str]]:
    """
    Configure a client for the grid of an invitation; return its settings, and the names of new aliases.

    Raises:
        InvitationError: the directory belongs to another grid.
        UsageError, SinkError: the directory cannot be written.
    """
    for sentence in taken.skipped:
        console.note(sentence)
    if client_paths.is_configured(place.directory) and not client_creation.is_automatic(
        place.directory
    ):
        return add_to(console, place.directory, taken)
    named = free_aliases(taken, {})
    config = invite_and_join.create_member(
        place.directory,
        taken,
        aliases=alias_lines(named),
        preferences=client_creation.ClientPreferences(
            connections=client_config.connections_of(place.own)[1]
        ),
        moved=partial(cmd_init.print_moved, console),
    )
    if place.name is not None:
        user_grids.name_grid(place.own, place.name, place.directory)
        console.note(f"'pipegrid --grid {place.name}' uses this grid")
    print_aliases(console, named)
    return config, list(named)


def add_to(console: Console, directory: Path, taken: Invitation) -> tuple[GridConfig, list[str]]:
    """
    Add the new servers and aliases of an invitation to a client's directory of the same grid; return the same
    as ``join``.

    Raises:
        InvitationError: the directory uses another grid.
    """
    config = client_config.load(directory)
    if not invite_and_join.is_same_grid(config, taken):
        raise InvitationError(
            f"{directory} uses another grid already, and was not changed; ask for a new code, and add the "
            "grid with 'pipegrid --grid NAME join CODE', NAME being your choice"
        )
    new = invite_and_join.add_servers(directory, taken.servers)
    console.note(f"{directory} uses this grid already; {counted(len(new), 'server')} added")
    if invite_and_join.is_of_members(taken) and invite_and_join.add_introducers(
        directory, taken.introducers
    ):
        console.note(f"{directory} finds servers that join later by itself from now on")
        if invite_and_join.own_server(directory) is not None:
            invite_and_join.set_announced(directory, {}, True)
            console.note("restart 'pipegrid serve', so that all members find the server")
        config = client_config.load(directory)
    known = {(each.furl.tub_id, each.furl.swissnum) for each in config.introducers.addresses}
    for each in taken.introducers:
        if (each.furl.tub_id, each.furl.swissnum) not in known:
            console.note(
                f"the introducer {printable(each.furl.address)} of the invitation is not in "
                f"{client_paths.INTRODUCERS_NAME}, which is left as it is; add it there to use it"
            )
    existing = aliases.read_aliases(directory)
    named = free_aliases(taken, existing)
    for name, cap in named.items():
        aliases.add_alias(directory, name, str(cap))
    print_aliases(console, named)
    return client_config.load(directory), list(named)


def free_aliases(taken: Invitation, existing: dict[str, str]) -> dict[str, DirectoryCap]:
    """Return the caps of an invitation that have no alias yet, by new aliases for them."""
    found: dict[str, DirectoryCap] = {}
    names = {unicodedata.normalize("NFC", name) for name in existing}
    for wanted, cap in taken.caps.items():
        if str(cap) in existing.values() or cap in found.values():
            continue
        name = unused_alias(wanted, names, aliases.MAX_NAME_CHARACTERS - 4)
        names.add(name)
        found[name] = cap
    return found


def unused_alias(wanted: str, used: Collection[str], most: int | None = None) -> str:
    """
    Return a new alias made from a name: cut to ``most`` characters, and with a number if it is in ``used``.
    """
    try:
        base = aliases.checked_name(wanted)[:most]
    except UsageError:
        base = UNNAMED
    name, number = base, 2
    while name in used:
        name, number = f"{base}-{number}", number + 1
    return name


def alias_lines(named: dict[str, DirectoryCap]) -> str:
    """Return the text of an aliases file with these aliases."""
    return "".join(f"{name}: {cap}\n" for name, cap in named.items())


def print_aliases(console: Console, named: dict[str, DirectoryCap]) -> None:
    """Report the aliases of the directories that came with the invitation."""
    for name, cap in named.items():
        grants = "can be read" if cap.readonly() == cap else "can be read and changed"
        console.note(f"'{name}:' is a directory that {grants}")


# ``pipegrid serve --join``: starts a server that joins a grid.


class ServerJoin:
    """
    A server that joins a grid: it takes the invitation, starts, and then is added to the grid.

    If the grid has introducers, the server is announced to them, now and at each later start. If the grid has
    none, or only introducers that its members' servers run, the inviter's client adds the server to its own
    list of servers, and confirms this before anything is configured here.

    Args:
        directory: the server's directory; it also becomes a client's directory of the grid.
        options: the values of ``tub.port``, ``tub.location`` and ``nickname`` on the command line.

    Raises:
        UsageError: the code is malformed, or the directory cannot be configured.
    """

    def __init__(self, directory: Path, code: str, relay_url: str, options: dict[str, str]) -> None:
        self._directory = directory
        self._code = invitation_messages.checked_code(code)
        self._relay_url = invitation_messages.checked_relay(relay_url)
        self._options = options
        self._exchange: wormhole_exchange.WormholeExchange | None = None
        self._taken: Invitation | None = None
        self._answers = False
        self.joined = False
        invite_and_join.check_can_join(directory)
        if client_creation.is_automatic(directory):
            raise UsageError(
                f"{directory} has a grid on this machine, which the first command made; give the server "
                "another directory: 'pipegrid -d DIR serve --join CODE'"
            )

    async def take(self, reactor: Any, console: Console) -> Invitation:
        """
        Receive the invitation, and return it.

        Raises:
            InvitationError: no invitation was received, or it is for another grid than the directory's.
        """
        load_library()
        policy, _ = client_config.connections_of(self._directory)
        self._exchange = wormhole_exchange.WormholeExchange(
            reactor, self._relay_url, ADVICE, policy
        )
        self._taken, self._answers = await wormhole_exchange.take(self._exchange, self._code)
        for sentence in self._taken.skipped:
            console.note(sentence)
        invite_and_join.refuse_other_grid(self._directory, self._taken)
        if not self._taken.introducers and not self._answers:
            raise InvitationError(
                "this invitation has no introducer, and its sender cannot add a server; ask for another"
            )
        return self._taken

    async def finish(self, node: StorageNode, console: Console) -> None:
        """
        Make the running server known to the grid, and configure the directory.

        Raises:
            InvitationError: the inviter does not add the server.
        """
        assert self._exchange is not None
        assert self._taken is not None
        taken = self._taken
        own = invite_and_join.server_at(
            node.nurls,
            node.furl,
            self._options.get("nickname", ""),
            (node.server_id, node.permutation_seed) if node.server_id else None,
        )
        is_listed = not taken.introducers or (
            invite_and_join.is_of_members(taken) and self._answers
        )
        if is_listed:
            reply = await wormhole_exchange.offer_server(self._exchange, own)
            if not reply.added:
                raise InvitationError(
                    "the inviter does not add the server; ask why, and for a new code"
                )
            taken = taken.with_server(own, reply.numbers)
        self._configure(console, taken, is_listed)
        self.joined = True

    def _configure(self, console: Console, taken: Invitation, is_listed: bool) -> None:
        node = {name: value for name, value in self._options.items() if value}
        announce = bool(taken.introducers)
        if client_paths.is_configured(self._directory):
            add_to(console, self._directory, taken)
            invite_and_join.set_announced(self._directory, node, announce)
            return
        named = free_aliases(taken, {})
        nickname = node.pop("nickname", taken.nickname)
        config = invite_and_join.create_member(
            self._directory,
            taken.with_nickname(nickname),
            aliases=alias_lines(named),
            preferences=client_creation.ClientPreferences(node=node, announce=announce),
        )
        how = "announced to the introducer"
        if is_listed:
            how = f"added to the inviter's list{f', and {how} of its members' if announce else ''}"
        console.note(f"the server has joined, and was {how}; {cmd_init.numbers_of(config)}")
        print_aliases(console, named)

    async def close(self) -> None:
        """Report to the inviter whether the server has joined, and end the exchange."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        if self._answers and self._taken is not None:
            exchange.send(invitation_messages.JoinReply(self.joined).as_message())
        await exchange.close()

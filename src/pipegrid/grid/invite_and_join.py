"""
Invites others to the grid of a client's directory, and creates or extends a client's directory from an
invitation.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs

from pipegrid.core import base32
from pipegrid.core.caps import DirectoryCap
from pipegrid.core.text import decode_text
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import InvitationError, SinkError, UsageError
from pipegrid.grid import client_creation
from pipegrid.grid.client_config import GridConfig, load
from pipegrid.grid.client_creation import ClientPreferences
from pipegrid.grid.client_paths import (
    ALIASES_NAME,
    CONFIG_NAME,
    INTRODUCERS_NAME,
    SERVERS_NAME,
    TAHOE_CONFIG_NAME,
    is_configured,
)
from pipegrid.grid.invitation_messages import GridNumbers, Invitation, entries_of
from pipegrid.grid.servers_and_introducers_yaml import (
    IntroducerAddress,
    Introducers,
    parse_static_servers,
    read_bounded,
    servers_of,
    with_servers,
)
from pipegrid.grid.strict_config import read_config
from pipegrid.server import identity
from pipegrid.wire.announcements import SEED, KnownServer, describe
from pipegrid.wire.server_address import Furl

# In a grid without an introducer, each member has a list of servers. ``invitation_of`` takes the list from a
# directory, ``create_member`` makes a directory from an invitation, and ``add_servers`` adds servers to an
# existing list. Existing entries are never replaced. The encoding parameters change with the number of
# servers, but only while they are the suggested ones. Each file is written as a whole, after all checks.
#
# A directory in which ``pipegrid serve`` runs is a member that has a server.

MEMBERS = "members"
"""The name, in a client's list, of the introducer that a member's server runs."""

# Making an invitation from a directory.


def invitation_of(directory: Path, caps: Mapping[str, DirectoryCap] | None = None) -> Invitation:
    """
    Return an invitation to the grid of a client's directory.

    Raises:
        UsageError: the directory is not configured, or its servers are storage directories that other clients
            cannot reach.
    """
    config = load(directory)
    if config.local is not None:
        raise UsageError(
            f"the grid in {directory} is storage directories on this machine, which no other client reaches; "
            "start a server in a new directory with 'pipegrid -d DIR serve', and invite others with "
            "'pipegrid -d DIR invite'"
        )
    if not config.static.servers and not config.introducers.addresses:
        raise UsageError(
            f"{directory} names no servers that can be used"
            + "".join(f" ({warning})" for warning in config.warnings[:1])
            + f"; list some in {SERVERS_NAME}"
        )
    return Invitation(
        numbers=numbers_of(config),
        servers=config.static.servers,
        introducers=config.introducers.addresses,
        caps=caps or {},
        managers=config.managers,
    )


def numbers_of(config: GridConfig) -> GridNumbers:
    """Return the encoding parameters of a client's directory."""
    return GridNumbers(config.params, config.happy)


def own_server(directory: Path) -> KnownServer | None:
    """
    Return the storage server that runs, or has run, in a directory; None if there was none.

    Raises:
        UsageError: the server's files are damaged.
    """
    furl = identity.load_furl(directory)
    if furl is None or not (directory / "private" / "node.pem").exists():
        return None
    who = identity.load_or_create(directory)
    return server_at(who.nurls(furl.hints), furl, announced=identity.announced_as(directory))


def server_at(
    nurls: Sequence[str],
    furl: Furl | str,
    nickname: str = "",
    announced: tuple[str, bytes] | None = None,
) -> KnownServer:
    """
    Return the server with the given addresses.

    Args:
        announced: the id and the permutation seed under which introducers list the server, so that a list has
            it only once; None: the id that 'pipegrid init' would give the server.

    Raises:
        UsageError: one of the addresses is not valid.
    """
    addresses = [("the server's address", text) for text in (*nurls, str(furl))]
    ((server_id, entry),) = servers_of(addresses)["storage"].items()
    fields = {**entry["ann"], **({"nickname": nickname} if nickname else {})}
    if announced is not None:
        server_id, seed = announced
        fields[SEED] = base32.encode(seed)
    return describe(server_id, fields)


def own_introducer(directory: Path) -> tuple[IntroducerAddress, ...]:
    """
    Return the introducer that a directory's storage server runs for invited members; empty if it runs none.

    Raises:
        UsageError: the introducer's file is damaged.
    """
    furl = identity.load_furl(directory, identity.MEMBERS_FURL_NAME)
    return () if furl is None or not furl.has_address else (IntroducerAddress(MEMBERS, furl),)


def is_of_members(invitation: Invitation) -> bool:
    """Return whether an invitation has introducers, and all of them run at servers that it lists."""
    return bool(invitation.introducers) and client_creation.runs_at(
        invitation.introducers, invitation.servers
    )


def include_own_server(directory: Path) -> str | None:
    """
    Add the server of a directory to the directory's grid; if the directory is not configured, make it a
    client of a new grid with this server.

    Returns:
        a sentence for the user if the server was added, or the new grid was made; else None.

    Raises:
        UsageError: the directory is neither configured nor a server's.
    """
    server = own_server(directory)
    if not is_configured(directory):
        if server is None:
            raise UsageError(
                f"no grid is configured in {directory}; make one with 'pipegrid serve' or 'pipegrid init', "
                "or name a client's directory"
            )
        params, happy = client_creation.suggested(1)
        files = {SERVERS_NAME: _servers_text([server])}
        if introducers := own_introducer(directory):
            files[INTRODUCERS_NAME] = Introducers(introducers).as_text()
        client_creation.create_client(directory, params=params, happy=happy, files=files)
        return f"made {directory} a client of a new grid with its own server"
    config = load(directory)
    is_ours = (directory / CONFIG_NAME).exists()
    if server is None or config.local is not None or config.introducers.addresses or not is_ours:
        return None
    added = add_servers(directory, [server])
    add_introducers(directory, own_introducer(directory))
    return f"added the directory's own server to {directory / SERVERS_NAME}" if added else None


def add_introducers(directory: Path, introducers: Sequence[IntroducerAddress]) -> bool:
    """
    Write introducers into a directory that has none, if all of them run at the directory's listed servers.

    Returns:
        whether they were written.

    Raises:
        UsageError, SinkError: the file cannot be written.
    """
    path = directory / INTRODUCERS_NAME
    config = load(directory)
    if not introducers or os.path.lexists(path) or config.introducers.addresses:
        return False
    if not client_creation.runs_at(introducers, config.static.servers):
        return False
    client_creation.rewrite(path, Introducers(tuple(introducers)).as_text())
    return True


def unreachable_servers(servers: Iterable[KnownServer]) -> list[str]:
    """Return the addresses of servers that can be reached only from this machine."""
    return [
        f"{each.nurl.host}:{each.nurl.port}"
        for each in servers
        if each.nurl is not None and _is_loopback(each.nurl.host)
    ]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Creating or extending a directory from an invitation.


def check_can_join(directory: Path) -> None:
    """
    Check, before a code is used, that a grid can be configured in a directory.

    Raises:
        UsageError: the directory is a Tahoe-LAFS node's, or has files of another grid.
    """
    if is_configured(directory):
        if not (directory / CONFIG_NAME).exists():
            raise UsageError(
                f"{directory} is a Tahoe-LAFS node's directory, which is never written; choose another "
                f"(its {TAHOE_CONFIG_NAME} says which grid it uses)"
            )
        return
    for name in (SERVERS_NAME, INTRODUCERS_NAME, ALIASES_NAME):
        if os.path.lexists(directory / name):
            raise UsageError(
                f"{directory / name} exists already, and may be another grid's; choose another directory, "
                "or move the file away"
            )


def is_same_grid(config: GridConfig, invitation: Invitation) -> bool:
    """
    Return whether an invitation and a directory's settings name a server or an introducer in common, so that
    both mean the same grid.
    """
    ours = _keys(config.static.servers) | {
        (each.furl.tub_id, each.furl.swissnum) for each in config.introducers.addresses
    }
    theirs = _keys(invitation.servers) | {
        (each.furl.tub_id, each.furl.swissnum) for each in invitation.introducers
    }
    return bool(ours & theirs)


def create_member(
    directory: Path,
    invitation: Invitation,
    *,
    aliases: str = "",
    preferences: ClientPreferences | None = None,
    moved: Callable[[Path], None] | None = None,
) -> GridConfig:
    """
    Make a directory a client's directory of an invitation's grid, and return its settings.

    A new directory gets its name only when it is complete. In a server's directory the settings are written
    last, and files made before an error are removed.

    Args:
        aliases: the text of the new directory's file of aliases.
        preferences: further settings; grid managers and nickname are the invitation's.
        moved: as for ``client_creation.create_client``.

    Raises:
        UsageError: the directory is configured, or cannot be written.
        SinkError: the disk is full.
    """
    files = {}
    if invitation.servers:
        files[SERVERS_NAME] = _servers_text(invitation.servers)
    if invitation.introducers:
        files[INTRODUCERS_NAME] = Introducers(invitation.introducers).as_text()
    if aliases:
        files[ALIASES_NAME] = aliases
    said = attrs.evolve(
        preferences or ClientPreferences(),
        managers=invitation.managers,
        nickname=invitation.nickname,
    )

    def create(place: Path) -> GridConfig:
        numbers = invitation.numbers
        return client_creation.create_client(
            place, params=numbers.params, happy=numbers.happy, files=files, preferences=said
        )

    makes_space = moved is not None and client_creation.is_automatic(directory)
    if not makes_space and directory.is_dir() and any(directory.iterdir()):
        missing = [directory / name for name in files if not os.path.lexists(directory / name)]
        try:
            return create(directory)
        except BaseException:
            for path in missing:
                with suppress(OSError):
                    path.unlink()
            raise
    return _appear(directory, create, moved if makes_space else None)


def _appear(
    directory: Path, create: Callable[[Path], GridConfig], moved: Callable[[Path], None] | None
) -> GridConfig:
    """Create a directory under a hidden name, and rename it when it is complete."""
    directory = directory.absolute()
    hidden = directory.with_name(f".{directory.name}.{os.getpid()}.joining")
    try:
        shutil.rmtree(hidden, ignore_errors=True)  # left by an interrupted attempt
        create(hidden)
        if moved is not None:
            moved(client_creation.move_aside(directory))
        os.rename(hidden, directory)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError):
            text = f"cannot make {directory}: {error.strerror}; "
            if error.errno in FULL:
                raise SinkError(f"{text}free some space") from error
            raise UsageError(f"{text}choose another directory") from error
        raise
    return load(directory)


def add_servers(directory: Path, servers: Sequence[KnownServer]) -> list[KnownServer]:
    """
    Add servers to the list of a client's directory; returns those that were not listed before.

    If the encoding parameters are those suggested for the previous number of servers, they become those
    suggested for the new number.

    Raises:
        UsageError: the directory is a Tahoe-LAFS node's, or its list has a form to which nothing can be
            added.
        SinkError: the disk is full.
    """
    before = load(directory)
    if not (directory / CONFIG_NAME).exists():
        raise UsageError(
            f"{directory} is a Tahoe-LAFS node's directory, which is never written; add the server to its "
            f"{SERVERS_NAME} by hand"
        )
    known = _keys(before.static.servers)
    new = [each for each in servers if not _keys([each]) & known]
    if not new:
        return []
    path = directory / SERVERS_NAME
    text = with_servers(read_bounded(path) or b"", entries_of(new), str(path))
    client_creation.rewrite(path.resolve(), text)
    count = client_creation.listed_servers(before)
    if count is not None and (before.params, before.happy) == client_creation.suggested(count):
        params, happy = client_creation.suggested(count + len(new))
        numbers = {"required_shares": params.required_shares, "total_shares": params.total_shares}
        client_creation.change(directory, numbers, happy)
    return new


def _keys(servers: Iterable[KnownServer]) -> set[tuple[bytes, str]]:
    """
    Return the key hash and the secret of each address of the servers. The pair identifies a server in any
    list.
    """
    found: set[tuple[bytes, str]] = set()
    for each in servers:
        for address in each.addresses:
            key = address.tub_id if isinstance(address, Furl) else address.spki_hash
            found.add((key, address.swissnum))
    return found


def _servers_text(servers: Iterable[KnownServer]) -> str:
    text = with_servers(b"", entries_of(servers), SERVERS_NAME)
    assert parse_static_servers(text.encode("utf-8"), SERVERS_NAME).servers
    return text


def set_announced(directory: Path, node: Mapping[str, str], announce: bool) -> None:
    """
    Write into a configured directory how its server is found; existing settings do not change.

    Args:
        node: settings of ``[node]``.
        announce: whether the server is announced to the directory's introducers when it starts; False changes
            nothing.
    """
    path = directory / CONFIG_NAME
    _, parser = read_config(directory)
    text = before = decode_text(read_file(path), str(path), keep_ends=True)
    missing = {name: value for name, value in node.items() if not parser.has_option("node", name)}
    if missing:
        text = client_creation.with_settings(text, missing, "node")
    if announce and not parser.has_option("storage", "announce"):
        text = client_creation.with_settings(text, {"announce": "true"}, "storage")
    if text != before:
        client_creation.rewrite(path.resolve(), text)


def refuse_other_grid(directory: Path, invitation: Invitation) -> None:
    """
    Raise an error if a directory belongs to another grid than an invitation.

    Raises:
        InvitationError: the directory is configured for another grid.
    """
    if is_configured(directory) and not is_same_grid(load(directory), invitation):
        raise InvitationError(
            f"{directory} uses another grid already; ask for a new code, and choose another directory"
        )

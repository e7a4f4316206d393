"""The settings of a client, read from its directory, and durations as people write them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import attrs

from pipegrid.argument_checks import check_whole
from pipegrid.core import base32
from pipegrid.core.encoding_parameters import DEFAULT_SEGMENT_BYTES, Params
from pipegrid.core.text import counted, decode_text
from pipegrid.disk.durability import Policy
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError, naming
from pipegrid.grid.client_paths import (
    SERVERS_NAME,
    TAHOE_CONFIG_NAME,
    cache_directory,
    expanded,
    is_configured,
    state_directory,
)
from pipegrid.grid.servers_and_introducers_yaml import (
    Introducers,
    StaticServers,
    load_introducers,
    load_static_servers,
)
from pipegrid.grid.strict_config import RefusedSetting, SettingsFile, read_config
from pipegrid.grid.tahoe_settings_check import checked_config
from pipegrid.grid.tor_socks_settings import (
    connection_policy,
    policy_for_server,
    settings_to_copy,
)
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS, NO_CONNECTIONS, ConnectionPolicy
from pipegrid.transfer.put.ask_first_policy import AskFirst
from pipegrid.transfer.put.ask_first_policy import ask_first as parse_ask_first
from pipegrid.wire.grid_manager_certificates import ManagerKey, parse_manager_key

# A duration as people write it: ``7 days``, ``12h``, ``30 minutes``.

_DURATION = re.compile(r"\s*([0-9]{1,9})\s*([a-z]+)\s*\Z", re.I)
_UNITS_S = {
    unit: seconds
    for units, seconds in (
        (("s", "second", "seconds"), 1),
        (("m", "min", "minute", "minutes"), 60),
        (("h", "hour", "hours"), 3600),
        (("d", "day", "days"), 86400),
        (("w", "week", "weeks"), 7 * 86400),
    )
    for unit in units
}
MIN_KEPT_S = 60


def parse_kept(text: str) -> int:
    """
    Return a duration in seconds; it must be at least one minute.

    Raises:
        ValueError: the text is not a duration, or the duration is too short.
    """
    match = _DURATION.match(text)
    unit = _UNITS_S.get(match[2].lower()) if match else None
    seconds = 0 if match is None or unit is None else int(match[1]) * unit
    if seconds < MIN_KEPT_S:
        raise ValueError("it must be a duration such as '7 days', '12 hours' or '30 minutes'")
    return seconds


# A client's directory has settings, secrets and servers; ``client_creation`` creates one.
#
# Its layout is that of a Tahoe-LAFS node directory. ``pipegrid.cfg`` replaces ``tahoe.cfg``; settings with
# the same meaning have the same name:
#
#     pipegrid.cfg              [client] shares.needed, shares.total, shares.happy, segment_size,
#                               peers.preferred, force_foolscap, foolscap_beside, mutable.format, ask_first
#                               [local] directory, servers, durability, keep_unfinished; [node] nickname
#                               [grid_managers] names and public keys
#     private/convergence       the convergence secret, base32
#     private/secret            the lease secret, base32
#     private/servers.yaml      servers (see ``servers_and_introducers_yaml``)
#     private/introducers.yaml  introducers (see ``servers_and_introducers_yaml``)
#
# A directory with a ``tahoe.cfg`` belongs to a Tahoe-LAFS node. **Nothing is ever written in it** except
# ``private/aliases``, when the user asks for it. Caches go to the user's cache directory, and state that must
# not be lost goes to the user's data directory.

T = TypeVar("T")

DEFAULT_SERVERS = 10
MAX_LOCAL_SERVERS = 1000
DURABILITIES: dict[str, Policy] = {"none": "none", "batch": "batch", "strict": "strict"}
SECRET_BYTES = 32
_SEGMENT_SIZE_OF_TAHOE = "shares._max_immutable_segment_size_for_testing"
_MAX_SECRET_BYTES = 64 << 10
"""The largest file with a secret; a convergence secret can have any length up to this."""


class LocalGrid(NamedTuple):
    """
    The settings of an embedded grid, whose storage directories are served within the client's process.

    Attributes:
        directory: contains one storage directory for each server: ``00``, ``01`` and so on.
        servers: the number of servers.
        durability: ``none``, ``batch`` or ``strict``.
        keep_unfinished_s: how long after its last write an unfinished upload is kept; None: seven days.
    """

    directory: Path
    servers: int = DEFAULT_SERVERS
    durability: Policy = "batch"
    keep_unfinished_s: float | None = None


@attrs.frozen
class GridConfig:
    """
    The settings, secrets and servers of a client's directory.

    Attributes:
        directory: the client's directory.
        params: the default encoding parameters.
        happy: servers of happiness that an upload must reach.
        convergence: the convergence secret.
        lease_secret: 32 bytes from which all lease and upload secrets derive.
        local: the embedded grid, or None.
        static: the servers in ``private/servers.yaml``, with warnings about skipped entries.
        introducers: the introducers in ``private/introducers.yaml``, with warnings about skipped entries.
        preferred: ids of servers that come first in the permuted order of every file.
        nickname: the name that the client gives to introducers; may be empty.
        caches: directories with cached announcements; only the first is written. May be empty.
        state: the directory for state that must not be lost; None: the first of the caches.
        force_foolscap: use Foolscap even with servers that also speak HTTPS.
        foolscap_beside: send many small files over Foolscap to servers that speak both protocols but accept
            no bundles over HTTPS. Tahoe-LAFS does not have this setting.
        mutable_format: the format of new mutable files and directories, ``sdmf`` or ``mdmf``.
        managers: grid managers. If there are any, only servers with a valid certificate get shares.
        ask_first: when puts ask for existing shares before they send shares: ``auto``, ``always`` or
            ``never``. Tahoe-LAFS does not have this setting.
        connections: how connections may be made.
        server_connections: how connections may be made to servers with a setting of their own, by server id.
    """

    directory: Path
    params: Params
    happy: int
    convergence: bytes = attrs.field(repr=False)
    lease_secret: bytes = attrs.field(repr=False)
    local: LocalGrid | None
    static: StaticServers = attrs.field(factory=StaticServers)
    introducers: Introducers = attrs.field(factory=Introducers)
    preferred: frozenset[str] = frozenset()
    nickname: str = ""
    caches: tuple[Path, ...] = ()
    state: Path | None = None
    force_foolscap: bool = False
    foolscap_beside: bool = True
    mutable_format: str = "sdmf"
    managers: tuple[ManagerKey, ...] = ()
    ask_first: AskFirst = "auto"
    connections: ConnectionPolicy = NO_CONNECTIONS
    server_connections: Mapping[str, ConnectionPolicy] = attrs.field(factory=dict)

    def connections_to(self, server_id: str) -> ConnectionPolicy:
        """Return how connections may be made to a server."""
        return self.server_connections.get(server_id, self.connections)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether all known servers are storage directories on this machine."""
        return self.local is not None and not (self.static.servers or self.introducers.addresses)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about problems with the directory that do not prevent its use."""
        return self.static.warnings + self.introducers.warnings


def load(
    directory: Path | str, *, offline: bool = False, follows_blacklist: bool = False
) -> GridConfig:
    """
    Return the settings of a client's directory.

    Args:
        offline: the caller will not connect to any server, so connection settings are not checked.
        follows_blacklist: the caller blocks the files that ``access.blacklist`` names (see
            ``checked_config``).

    Raises:
        UsageError: the directory is not a client's, or a setting is not valid; the text names file and
            setting.
    """
    directory = Path(directory)
    if offline:
        path, parser = read_config(directory)
    else:
        path, parser = checked_config(directory, "client", follows_blacklist)
    is_tahoe = path.name == TAHOE_CONFIG_NAME
    params, happy = _encoding(parser, path)
    private = directory / "private"
    connections = NO_CONNECTIONS if offline else connection_policy(parser, is_tahoe)
    # If ``servers.yaml`` or ``introducers.yaml`` cannot be read, the servers of the other file are still
    # used.
    static = _or_warning(lambda: load_static_servers(directory), StaticServers)
    caches = _caches(directory) if is_tahoe else (private,)
    return GridConfig(
        directory=directory,
        params=params,
        happy=happy,
        convergence=_secret(private / "convergence", None, is_tahoe),
        lease_secret=_secret(private / "secret", SECRET_BYTES, is_tahoe),
        local=None if is_tahoe else _local(parser, path, directory),
        static=static,
        introducers=_or_warning(
            lambda: load_introducers(directory, old_introducer(parser)), Introducers
        ),
        preferred=_preferred(parser),
        nickname=nickname_of(parser),
        caches=caches,
        state=state_directory() / caches[0].name if is_tahoe and caches else None,
        force_foolscap=_flag(parser, "client", "force_foolscap", False),
        foolscap_beside=is_tahoe or _flag(parser, "client", "foolscap_beside", True),
        mutable_format=parser.get("client", "mutable.format", fallback="sdmf").strip().lower(),
        managers=_managers(parser),
        ask_first="auto" if is_tahoe else _ask_first(parser),
        connections=connections,
        server_connections={
            server_id: policy_for_server(
                connections, way, f"{directory / SERVERS_NAME}: server {server_id[:60]!r}"
            )
            for server_id, way in (() if offline else static.ways.items())
        },
    )


def connections_of(directory: Path) -> tuple[ConnectionPolicy, dict[str, dict[str, str]]]:
    """
    Return the connection policy of a directory, and its connection settings by section and name.

    A directory that is not configured has no connection settings.

    Raises:
        UsageError: the settings cannot be read, or are refused.
    """
    if not is_configured(directory):
        return DIRECT_CONNECTIONS, {}
    path, parser = checked_config(directory, "client", follows_blacklist=True)
    policy = connection_policy(parser, path.name == TAHOE_CONFIG_NAME)
    return policy, settings_to_copy(parser)


def nickname_of(parser: SettingsFile) -> str:
    """Return the client's nickname, which may be empty."""
    return parser.get("node", "nickname", fallback="").strip()


def _or_warning(load: Callable[[], T], empty: Callable[..., T]) -> T:
    try:
        return load()
    except RefusedSetting:
        raise
    except UsageError as error:
        return empty(warnings=(str(error),))


def old_introducer(parser: SettingsFile) -> str | None:
    """
    Return the fURL of ``[client] introducer.furl``, which old configurations have; None if there is none.
    """
    text = parser.get("client", "introducer.furl", fallback="").strip()
    return text if text not in ("", "None") else None


def _preferred(parser: SettingsFile) -> frozenset[str]:
    texts = parser.get("client", "peers.preferred", fallback="").split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def _managers(parser: SettingsFile) -> tuple[ManagerKey, ...]:
    names = parser.options("grid_managers") if parser.has_section("grid_managers") else ()
    return tuple(parse_manager_key(name, parser.get("grid_managers", name)) for name in names)


def _ask_first(parser: SettingsFile) -> AskFirst:
    try:
        return parse_ask_first(parser.get("client", "ask_first", fallback="auto").strip())
    except UsageError as error:
        where = parser.at("client", "ask_first").removesuffix("ask_first")  # named in ``error``
        raise UsageError(f"{where}{error}") from None


def _caches(node: Path) -> tuple[Path, ...]:
    """
    Return the cache directories for a Tahoe-LAFS node's directory: one in the user's cache, then the node's
    own, which is only read.
    """
    try:
        own = cache_directory()
    except UsageError:
        return ()  # a user without a home directory has no cache
    digest = hashlib.sha256(os.fsencode(node.resolve())).hexdigest()[:32]
    return own / digest, node / "private"


def _encoding(parser: SettingsFile, path: Path) -> tuple[Params, int]:
    is_tahoe = path.name == TAHOE_CONFIG_NAME
    segment_size = _SEGMENT_SIZE_OF_TAHOE if is_tahoe else "segment_size"
    numbers = (
        _number(parser, "client", "shares.needed", 3),
        _number(parser, "client", "shares.total", 10),
        _number(parser, "client", segment_size, DEFAULT_SEGMENT_BYTES),
    )
    happy = _number(parser, "client", "shares.happy", min(7, numbers[1]))
    try:
        params = Params(*numbers)
        check_happy(happy, params)
    except UsageError as error:
        raise UsageError(f"{path}: [client] {error}") from None
    return params, happy


def _local(parser: SettingsFile, path: Path, directory: Path) -> LocalGrid | None:
    if not parser.has_section("local"):
        return None
    durability = parser.get("local", "durability", fallback="batch")
    if durability not in DURABILITIES:
        raise UsageError(
            f"{parser.at('local', 'durability')} is {durability!r}; it must be one of "
            f"{', '.join(DURABILITIES)}"
        )
    servers = _number(parser, "local", "servers", DEFAULT_SERVERS)
    try:
        check_servers(servers)
    except UsageError as error:
        raise UsageError(f"{path}: [local] {error}") from None
    storage = parser.get("local", "directory", fallback="storage")
    kept = parser.get("local", "keep_unfinished", fallback="").strip()
    try:
        keep_unfinished_s = parse_kept(kept) if kept else None
    except ValueError as error:
        where = parser.at("local", "keep_unfinished")
        raise UsageError(f"{where} is {kept!r}; {error}") from None
    durable = DURABILITIES[durability]
    where = parser.at("local", "directory")
    if not storage.strip():
        raise UsageError(f"{where} names none; write one, such as 'storage', or leave the line out")
    place = expanded(storage, directory, where)
    return LocalGrid(place, servers, durable, keep_unfinished_s)


def check_servers(servers: int) -> None:
    """Raise UsageError unless an embedded grid can have this number of servers."""
    if not 1 <= servers <= MAX_LOCAL_SERVERS:
        raise UsageError(f"an embedded grid has 1 to {MAX_LOCAL_SERVERS} servers, not {servers}")


def check_happy(happy: int, params: Params) -> None:
    """Raise UsageError unless an upload can reach ``happy`` with ``params``."""
    check_whole(happy, "the number of servers of happiness")
    if not 1 <= happy <= params.total_shares:
        raise UsageError(
            f"{counted(params.total_shares, 'share')} can never be on {counted(happy, 'server')}; "
            f"choose happy from 1 to {params.total_shares}"
        )


def _number(parser: SettingsFile, section: str, option: str, default: int) -> int:
    text = parser.get(section, option, fallback=str(default)).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        of_what = " of bytes, such as 131072" if "segment_size" in option else ""
        raise UsageError(
            f"{parser.at(section, option)} is {text!r}; it must be a whole number{of_what}"
        )
    return int(text)


def _flag(parser: SettingsFile, section: str, option: str, otherwise: bool) -> bool:
    try:
        return parser.getboolean(section, option, fallback=otherwise)
    except ValueError:
        raise UsageError(f"{parser.at(section, option)} must be true or false") from None


def _secret(path: Path, length: int | None, is_tahoe: bool) -> bytes:
    try:
        data = read_file(path, _MAX_SECRET_BYTES + 1)
        if len(data) > _MAX_SECRET_BYTES:
            raise ValueError
        secret = base32.decode(decode_text(data, str(path)).strip())
    except FileNotFoundError:
        remedy = (
            "start that Tahoe-LAFS node once, which makes it"
            if is_tahoe
            else "restore it, or make a new grid directory with 'pipegrid init'"
        )
        raise UsageError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{path} does not hold a base32 secret; restore it") from None
    if not secret:
        text = f"{path} is empty, as after a full disk or a crash; restore it"
        if length:
            raise UsageError(text)
        purpose = "convergence=b''"
        text += f" ({purpose} stores without a secret on purpose)"
        raise naming(UsageError(text), purpose)
    if length is not None and len(secret) != length:
        raise UsageError(f"{path} holds {len(secret)} bytes instead of {length}; restore it")
    return secret

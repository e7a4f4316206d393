"""
Creates a client's directory, with its settings and fresh secrets.

Existing files are never replaced. ``client_config`` describes the files and reads them. A directory counts as
configured once it has a ``pipegrid.cfg``, so that file is written last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from pipegrid.core import base32
from pipegrid.core.encoding_parameters import DEFAULT_SEGMENT_BYTES, Params
from pipegrid.core.text import counted, decode_text
from pipegrid.disk.atomic_write import create_file, remove_stale_link, replace_file
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import SinkError, UsageError, naming
from pipegrid.grid.client_config import (
    DEFAULT_SERVERS,
    DURABILITIES,
    SECRET_BYTES,
    GridConfig,
    check_happy,
    check_servers,
    load,
)
from pipegrid.grid.client_paths import (
    ALIASES_NAME,
    CONFIG_NAME,
    INTRODUCERS_NAME,
    SERVERS_NAME,
    TAHOE_CONFIG_NAME,
    aside_of,
    is_configured,
)
from pipegrid.grid.servers_and_introducers_yaml import (
    IntroducerAddress,
    load_introducers,
    load_static_servers,
)
from pipegrid.grid.strict_config import read_config, settings_in
from pipegrid.grid.tor_socks_settings import settings_to_copy
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.grid_manager_certificates import ManagerKey

DEFAULT_HAPPY = 7
AUTOMATIC = "# Made by the first command, since no grid was configured."
"""First line of an automatic configuration. ``init`` moves such a grid aside to configure the user's grid."""

_MOST_ASIDE = 100
MAX_COPIED_BYTES = 16 << 20
"""The size limit of each file copied from a Tahoe-LAFS node's directory."""
_ALIASES_NAMES = (ALIASES_NAME, "private/root_dir.cap")


def suggested(servers: int) -> tuple[Params, int]:
    """
    Return encoding parameters for a number of servers, and the servers of happiness that an upload needs.

    There is one share for each server, up to ten. About a third of the shares restore a file. An upload needs
    about two thirds of the servers, so that it succeeds while one server is down, and its files survive the
    loss of another. With ten servers or more the result is Tahoe-LAFS's default: 3, 7 and 10.
    """
    total = min(10, servers)
    happy = max(min(2, total), (7 * total + 5) // 10)
    return Params(min(3, (total + 2) // 3), total), happy


def create_local(
    directory: Path | str,
    *,
    servers: int = DEFAULT_SERVERS,
    params: Params | None = None,
    happy: int | None = None,
    durability: str = "batch",
    automatic: bool = False,
) -> GridConfig:
    """
    Make ``directory`` a client's directory with an embedded grid, and return its settings.

    Existing secrets are kept, since they decide which files converge.

    Args:
        happy: servers of happiness; by default 7, or fewer if there are fewer servers or shares.
        automatic: the user did not ask for this grid, so ``init`` may move it aside.

    Raises:
        UsageError: the directory is already configured or cannot be written, or the encoding parameters or
            number of servers are not valid.
        SinkError: the disk is full.
    """
    params = params or Params()
    check_servers(servers)
    if happy is None:
        happy = min(DEFAULT_HAPPY, servers, params.total_shares)
    check_happy(happy, params)
    check_servers_for(happy, servers)
    if durability not in DURABILITIES:
        raise UsageError(f"the durability is one of {', '.join(DURABILITIES)}, not {durability!r}")
    local = [
        "",
        "[local]",
        "directory = storage",
        f"servers = {servers}",
        f"durability = {durability}",
    ]
    return _create(Path(directory), params, happy, local, automatic=automatic)


@attrs.frozen
class ClientPreferences:
    """
    The settings of a client's directory other than encoding parameters.

    Attributes:
        preferred: ids of servers that come first in the permuted order of every file.
        force_foolscap: use Foolscap even with servers that also speak HTTPS.
        nickname: the name that the client gives to introducers.
        mutable_format: the format of new mutable files and directories.
        managers: the trusted grid managers.
        node: further settings of ``[node]``, such as ``tub.port`` of a server in the same directory.
        announce: whether a server in the same directory is announced to the introducers when it starts.
        connections: further settings by section, such as ``[tor]``.
    """

    preferred: frozenset[str] = frozenset()
    force_foolscap: bool = False
    nickname: str = ""
    mutable_format: str = "sdmf"
    managers: Sequence[ManagerKey] = ()
    node: Mapping[str, str] = attrs.field(factory=dict)
    announce: bool = False
    connections: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)


def create_client(
    directory: Path | str,
    *,
    params: Params | None = None,
    happy: int | None = None,
    files: Mapping[str, str] | None = None,
    preferences: ClientPreferences | None = None,
    moved: Callable[[Path], None] | None = None,
) -> GridConfig:
    """
    Make ``directory`` a client's directory without an embedded grid, and return its settings.

    Its servers come from ``private/servers.yaml`` and from introducers. Secrets and errors are as for
    ``create_local``.

    Args:
        files: the content of files to create in the directory, by name, such as ``private/servers.yaml``;
            None: no files.
        moved: called with the new path of an automatic grid that is moved aside; None: an automatic grid is
            an error.
    """
    params = params or Params()
    happy = min(DEFAULT_HAPPY, params.total_shares) if happy is None else happy
    check_happy(happy, params)
    more = [] if preferences is None else _preference_lines(preferences)
    return _create(Path(directory), params, happy, more, files, moved)


def _preference_lines(said: ClientPreferences) -> list[str]:
    """Return preferences as lines of a ``pipegrid.cfg``."""
    more = [f"peers.preferred = {', '.join(sorted(said.preferred))}"] if said.preferred else []
    more += ["force_foolscap = true"] if said.force_foolscap else []
    more += [f"mutable.format = {said.mutable_format}"] if said.mutable_format != "sdmf" else []
    nickname = " ".join(said.nickname.split())
    others = {name: dict(values) for name, values in said.connections.items()}
    named = {"nickname": nickname} if nickname else {}
    node = {**named, **said.node, **others.pop("node", {})}
    more += ["", "[node]", *(f"{name} = {value}" for name, value in node.items())] if node else []
    more += ["", "[storage]", "announce = true"] if said.announce else []
    for section, values in others.items():
        more += ["", f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    if said.managers:
        more += ["", "[grid_managers]", *(f"{each.name} = {each}" for each in said.managers)]
    return more


def create_like_tahoe(
    directory: Path | str,
    node: Path | str,
    *,
    params: Params | None = None,
    happy: int | None = None,
    moved: Callable[[Path], None] | None = None,
) -> GridConfig:
    """
    Make ``directory`` a client's directory with the settings of a Tahoe-LAFS node, and return its settings.

    Encoding parameters, secrets, aliases, introducers, servers, preferences, grid managers and nickname are
    copied; the node's directory is only read.

    Raises:
        UsageError: as for ``create_client``; or a file of the node cannot be read completely, so the new
            directory would lack servers.
    """
    node = Path(node)
    if not (node / TAHOE_CONFIG_NAME).is_file():
        raise UsageError(
            f"{node} is not a Tahoe-LAFS node's directory: it has no {TAHOE_CONFIG_NAME}; name one that has"
        )
    theirs = load(node)
    load_static_servers(node)  # raises the errors of which ``load`` only warns
    load_introducers(node)
    files = {
        "private/convergence": base32.encode(theirs.convergence) + "\n",
        "private/secret": base32.encode(theirs.lease_secret) + "\n",
    }
    if theirs.introducers.addresses:
        files[INTRODUCERS_NAME] = theirs.introducers.as_text()
    for name in (SERVERS_NAME, *_ALIASES_NAMES):
        if not (node / name).is_file():
            continue
        try:
            data = read_file(node / name, MAX_COPIED_BYTES + 1)
            files[name] = decode_text(data, str(node / name))
        except OSError as error:
            raise UsageError(f"cannot read {node / name}: {error.strerror}") from error
        if len(files[name]) > MAX_COPIED_BYTES:
            raise UsageError(
                f"{node / name} has more than {MAX_COPIED_BYTES} bytes; make it shorter"
            )
    return create_client(
        directory,
        params=params or theirs.params,
        happy=theirs.happy if happy is None and params is None else happy,
        files=files,
        preferences=ClientPreferences(
            preferred=theirs.preferred,
            force_foolscap=theirs.force_foolscap,
            nickname=theirs.nickname,
            mutable_format=theirs.mutable_format,
            managers=theirs.managers,
            connections=settings_to_copy(read_config(node)[1]),
        ),
        moved=moved,
    )


def change(
    directory: Path | str, encoding: Mapping[str, int], happy: int | None = None
) -> GridConfig:
    """
    Change the encoding parameters of a client's directory for later uploads, and return its new settings.

    The rest of its ``pipegrid.cfg``, including comments, does not change.

    Args:
        encoding: the fields of ``Params`` to change.
        happy: servers of happiness; by default unchanged, or fewer if there are fewer shares or servers.

    Raises:
        UsageError: the directory is not configured or is a Tahoe-LAFS node's, or the encoding parameters are
            not valid.
        SinkError: the disk is full.
    """
    directory = Path(directory)
    before = load(directory)
    path = directory / CONFIG_NAME
    if not path.exists():
        raise UsageError(
            f"{directory} is a Tahoe-LAFS node's, which is never written; change its "
            f"{TAHOE_CONFIG_NAME}, or give the options to 'put'"
        )
    params = attrs.evolve(before.params, **encoding)
    servers = known_servers(before)
    if happy is None:
        happy = min(before.happy, params.total_shares, servers or before.happy)
    check_happy(happy, params)
    check_servers_for(happy, servers)
    settings = {
        "shares.needed": str(params.required_shares),
        "shares.total": str(params.total_shares),
        "shares.happy": str(happy),
    }
    if params.max_segment_bytes != before.params.max_segment_bytes:
        settings["segment_size"] = str(params.max_segment_bytes)
    try:
        text = decode_text(read_file(path), str(path), keep_ends=True)
        replace_file(
            path.resolve(),  # keep ``path`` a symbolic link if it is one
            with_settings(text, settings).encode("utf-8"),
            mode=path.stat().st_mode & 0o777,
        )
    except OSError as error:
        if error.errno in FULL:
            raise SinkError(
                f"cannot write {path}: {error.strerror}; nothing was changed; free some space"
            ) from error
        raise UsageError(f"cannot write {path}: {error.strerror}; change it by hand") from error
    return load(directory)


def known_servers(config: GridConfig) -> int | None:
    """Return how many servers a client has; None if it knows none, or if introducers may name more."""
    if config.introducers.addresses:
        return None
    return len(config.static.servers) + (config.local.servers if config.local else 0) or None


def listed_servers(config: GridConfig) -> int | None:
    """
    Return the number of listed servers if all introducers run at listed servers; otherwise ``known_servers``.
    """
    introducers, servers = config.introducers.addresses, config.static.servers
    if introducers and servers and runs_at(introducers, servers):
        return len(servers)
    return known_servers(config)


def runs_at(introducers: Iterable[IntroducerAddress], servers: Iterable[KnownServer]) -> bool:
    """Return whether each of the introducers runs at one of the servers."""
    tubs = {each.furl.tub_id for each in servers if each.furl is not None}
    return all(each.furl.tub_id in tubs for each in introducers)


def check_servers_for(happy: int, servers: int | None) -> None:
    """Raise UsageError if the number of servers is known and too small for ``happy``."""
    if servers is not None and happy > servers:
        text = (
            f"{counted(servers, 'server')} can never hold a file on {happy} of them; "
            "make more servers or ask for less with happy"
        )
        raise naming(UsageError(text), "less with happy")


def with_settings(text: str, settings: Mapping[str, str], section: str = "client") -> str:
    """Return the text of a configuration in which one section has the given settings."""
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    places = [(number - 1, name) for number, where, name in settings_in(text) if where == section]
    at = {name.lower(): line for line, name in places if name is not None}
    if not places:
        if lines:
            lines[-1] = lines[-1].rstrip("\r\n") + end
        places = [(len(lines) + 1, None)]
        lines += [end, f"[{section}]{end}"]
    # Change the last lines first, so that the positions of earlier settings stay valid.
    for name, value in sorted(settings.items(), key=lambda each: -at.get(each[0], -1)):
        if name in at:
            following = at[name] + 1
            while following < len(lines) and lines[following][:1] in (" ", "\t"):
                following += 1  # the value continues on further lines
            lines[at[name] : following] = [f"{name} = {value}{end}"]
    missing = [f"{name} = {value}{end}" for name, value in settings.items() if name not in at]
    header = next(line for line, name in places if name is None)
    lines[header] = lines[header].rstrip("\r\n") + end
    return "".join([*lines[: header + 1], *missing, *lines[header + 1 :]])


def rewrite(path: Path, text: str) -> None:
    """
    Replace a file of a client's directory as a whole, and keep its mode.

    Raises:
        UsageError: the file cannot be written.
        SinkError: the disk is full.
    """
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        replace_file(path, text.encode("utf-8"), mode=mode)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}; nothing was changed"
        if error.errno in FULL:
            raise SinkError(f"{text}; free some space") from error
        raise UsageError(f"{text}; make it writable") from error


def _create(
    directory: Path,
    params: Params,
    happy: int,
    more_lines: list[str],
    files: Mapping[str, str] | None = None,
    moved: Callable[[Path], None] | None = None,
    automatic: bool = False,
) -> GridConfig:
    if moved is not None and is_automatic(directory):
        moved(move_aside(directory))
    if is_configured(directory):
        remove_stale_link(str(directory / CONFIG_NAME))
        text = (
            f"{directory} is configured already; use it as it is, change its numbers with params and happy "
            "alone, choose another directory, or move this one away first"
        )
        raise naming(UsageError(text), "params and happy")
    lines = [
        *([AUTOMATIC] if automatic else []),
        "# Settings of PipeGrid; what they mean: docs/reference-cli.md.",
        "[client]",
        f"shares.needed = {params.required_shares}",
        f"shares.total = {params.total_shares}",
        f"shares.happy = {happy}",
    ]
    if params.max_segment_bytes != DEFAULT_SEGMENT_BYTES:
        lines.append(f"segment_size = {params.max_segment_bytes}")
    lines += more_lines
    try:
        private = directory / "private"
        make_directory(private, 0o700)
        for name, text in (files or {}).items():
            data = text.encode("utf-8")
            if not _is_there(directory / name):
                create_file(directory / name, data)
            # An identical file was left by an interrupted attempt.
            elif read_file(directory / name, len(data) + 1) != data:
                raise UsageError(
                    f"{directory / name} exists already; remove it, or choose another directory"
                )
        for name in ("convergence", "secret"):
            if not _is_there(private / name):
                secret = base32.encode(os.urandom(SECRET_BYTES))
                create_file(private / name, f"{secret}\n".encode("ascii"))
        text = "\n".join([*lines, ""])
        mode = 0o600 if "[socks]" in more_lines else 0o644  # may contain a password
        create_file(directory / CONFIG_NAME, text.encode("utf-8"), mode=mode)
    except OSError as error:
        text = f"cannot make {directory} a grid directory: {error.strerror}; "
        if error.errno in FULL:  # keep the new files for the next attempt
            raise SinkError(f"{text}free some space") from error
        raise naming(UsageError(f"{text}choose another directory"), "another directory") from error
    return load(directory)


def is_automatic(directory: Path) -> bool:
    """Return whether a directory has only an automatically created grid on this machine."""
    try:
        begins = read_file(directory / CONFIG_NAME, len(AUTOMATIC))
    except OSError:
        return False
    named = (SERVERS_NAME, INTRODUCERS_NAME)
    return begins == AUTOMATIC.encode() and not any(
        os.path.lexists(directory / name) for name in named
    )


def move_aside(directory: Path) -> Path:
    """Move a grid's directory with its storage aside, and return its new path."""
    place = aside_of(directory)
    for number in range(2, _MOST_ASIDE):
        if not os.path.lexists(place):
            break
        place = directory.with_name(f"{aside_of(directory).name}-{number}")
    try:
        os.rename(directory, place)
    except OSError as error:
        raise UsageError(
            f"cannot move {directory} to {place}: {error.strerror}; move it, or choose another directory"
        ) from error
    return place


def _is_there(path: Path) -> bool:
    """
    Return whether a file exists. If an interrupted write has left the file's hidden name as well, remove this
    name.
    """
    remove_stale_link(str(path))
    return path.exists()

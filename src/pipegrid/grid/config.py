"""
A client's directory: its settings, secrets and servers.

The layout is that of a Tahoe-LAFS node directory, so that there is one format to know; settings
of PipeGrid's own are in ``pipegrid.cfg``, with the same names where the meaning is the same:

    pipegrid.cfg          [client] shares.needed, shares.total, shares.happy, segment_size
                          [local] directory, servers, durability
    private/convergence   the convergence secret, base32
    private/secret        the lease secret, base32
    private/servers.yaml  servers (see ``servers``)
"""

from __future__ import annotations

import configparser
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import attrs

from pipegrid.core import base32
from pipegrid.core.params import DEFAULT_SEGMENT_BYTES, Params
from pipegrid.errors import UsageError
from pipegrid.grid.servers import StaticServers, load_static_servers
from pipegrid.storage.durability import Policy

CONFIG_NAME = "pipegrid.cfg"
DEFAULT_SERVERS = 10
DEFAULT_HAPPY = 7
MAX_LOCAL_SERVERS = 1000
DURABILITIES: dict[str, Policy] = {"none": "none", "batch": "batch", "strict": "strict"}
_SECRET_BYTES = 32


@attrs.frozen
class LocalGrid:
    """
    An embedded grid: storage directories that are served in process.

    Attributes:
        directory: holds one storage directory for each server, ``00``, ``01`` and so on.
        servers: how many there are.
        durability: ``none``, ``batch`` or ``strict``.
    """

    directory: Path
    servers: int = DEFAULT_SERVERS
    durability: Policy = "batch"


@attrs.frozen
class GridConfig:
    """
    What a client's directory says.

    Attributes:
        directory: where all this was read.
        params: how files are encoded unless a call says otherwise.
        happy: servers of happiness that an upload must reach.
        convergence: the convergence secret.
        lease_secret: 32 bytes from which all lease and upload secrets derive.
        local: the embedded grid, or None.
        static: servers that ``private/servers.yaml`` names, and what is wrong with it.
    """

    directory: Path
    params: Params
    happy: int
    convergence: bytes = attrs.field(repr=False)
    lease_secret: bytes = attrs.field(repr=False)
    local: LocalGrid | None
    static: StaticServers = attrs.field(factory=StaticServers)


def default_directory() -> Path:
    """Return the user's own directory: $PIPEGRID_DIR, or ``pipegrid`` among the user's data."""
    explicit = os.environ.get("PIPEGRID_DIR")
    if explicit:
        return Path(explicit)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "pipegrid"


def is_configured(directory: Path) -> bool:
    """Return whether the directory holds a client's configuration."""
    return (directory / CONFIG_NAME).is_file()


def create_local(
    directory: Path | str,
    *,
    servers: int = DEFAULT_SERVERS,
    params: Params | None = None,
    happy: int | None = None,
    durability: str = "batch",
) -> GridConfig:
    """
    Make ``directory`` a client's directory with an embedded grid, and return what it says.

    Secrets that are there already are kept: they decide which files converge.

    Args:
        happy: by default 7, or fewer where the servers or shares do not allow more.

    Raises:
        UsageError: it is configured already, cannot be written, or the numbers are impossible.
    """
    params = params or Params()
    _check_servers(servers)
    if happy is None:
        happy = min(DEFAULT_HAPPY, servers, params.total_shares)
    check_happy(happy, params)
    if happy > servers:
        raise UsageError(
            f"{servers} servers can never hold a file on {happy} of them; "
            "make more servers or ask for less with --happy"
        )
    if durability not in DURABILITIES:
        raise UsageError(f"the durability is one of {', '.join(DURABILITIES)}, not {durability!r}")
    local = [
        "",
        "[local]",
        "directory = storage",
        f"servers = {servers}",
        f"durability = {durability}",
    ]
    return _create(Path(directory), params, happy, local)


def create_client(
    directory: Path | str, *, params: Params | None = None, happy: int | None = None
) -> GridConfig:
    """
    Make ``directory`` a client's directory without servers of its own, and return what it says.

    Its servers are those of ``private/servers.yaml``. Otherwise as ``create_local``.
    """
    params = params or Params()
    happy = min(DEFAULT_HAPPY, params.total_shares) if happy is None else happy
    check_happy(happy, params)
    return _create(Path(directory), params, happy, [])


def _create(directory: Path, params: Params, happy: int, more_lines: list[str]) -> GridConfig:
    if is_configured(directory):
        raise UsageError(
            f"{directory} is configured already; use it as it is, or choose another directory"
        )
    lines = [
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
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("convergence", "secret"):
            if not (private / name).exists():
                _write(private / name, base32.encode(os.urandom(_SECRET_BYTES)) + "\n", 0o600)
        _write(directory / CONFIG_NAME, "\n".join([*lines, ""]), 0o644)
    except OSError as error:
        raise UsageError(
            f"cannot make {directory} a grid directory: {error.strerror}; choose another with -d"
        ) from error
    return load(directory)


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file that is there whole or not at all, and is not replaced if it is there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # somebody made it at the same moment: theirs stands
            os.link(name, path)
    finally:
        os.unlink(name)


def load(directory: Path | str) -> GridConfig:
    """
    Return what a client's directory says.

    Raises:
        UsageError: it is not one, or says something impossible; the text names file and setting.
    """
    directory = Path(directory)
    path = directory / CONFIG_NAME
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{directory} is not a grid directory: it has no {CONFIG_NAME}; make one with "
            f"'pipegrid -d {directory} init'"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"cannot understand {path}: {first_line}; mend it by hand") from error

    params, happy = _encoding(parser, path)
    return GridConfig(
        directory=directory,
        params=params,
        happy=happy,
        convergence=_secret(directory / "private" / "convergence", None),
        lease_secret=_secret(directory / "private" / "secret", _SECRET_BYTES),
        local=_local(parser, path, directory),
        static=load_static_servers(directory),
    )


def _encoding(parser: configparser.ConfigParser, path: Path) -> tuple[Params, int]:
    numbers = (
        _number(parser, path, "client", "shares.needed", 3),
        _number(parser, path, "client", "shares.total", 10),
        _number(parser, path, "client", "segment_size", DEFAULT_SEGMENT_BYTES),
    )
    happy = _number(parser, path, "client", "shares.happy", min(7, numbers[1]))
    try:
        params = Params(*numbers)
        check_happy(happy, params)
    except UsageError as error:
        raise UsageError(f"{path}: [client] {error}") from None
    return params, happy


def _local(parser: configparser.ConfigParser, path: Path, directory: Path) -> LocalGrid | None:
    if not parser.has_section("local"):
        return None
    durability = parser.get("local", "durability", fallback="batch")
    if durability not in DURABILITIES:
        raise UsageError(
            f"{path}: [local] durability is {durability!r}; it must be one of "
            f"{', '.join(DURABILITIES)}"
        )
    servers = _number(parser, path, "local", "servers", DEFAULT_SERVERS)
    try:
        _check_servers(servers)
    except UsageError as error:
        raise UsageError(f"{path}: [local] {error}") from None
    storage = parser.get("local", "directory", fallback="storage")
    return LocalGrid(directory / storage, servers, DURABILITIES[durability])


def _check_servers(servers: int) -> None:
    if not 1 <= servers <= MAX_LOCAL_SERVERS:
        raise UsageError(f"an embedded grid has 1 to {MAX_LOCAL_SERVERS} servers, not {servers}")


def check_happy(happy: int, params: Params) -> None:
    """Raise UsageError unless an upload can reach ``happy`` with ``params``."""
    if not 1 <= happy <= params.total_shares:
        raise UsageError(
            f"{params.total_shares} shares can never be on {happy} servers; "
            f"choose happy from 1 to {params.total_shares}"
        )


def _number(
    parser: configparser.ConfigParser, path: Path, section: str, option: str, default: int
) -> int:
    text = parser.get(section, option, fallback=str(default)).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(f"{path}: [{section}] {option} is {text!r}; it must be a whole number")
    return int(text)


def _secret(path: Path, length: int | None) -> bytes:
    try:
        secret = base32.decode(path.read_text("ascii").strip())
    except FileNotFoundError:
        raise UsageError(
            f"{path} is missing; restore it, or make a new grid directory with 'pipegrid init'"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{path} does not hold a base32 secret; restore it") from None
    if length is not None and len(secret) != length:
        raise UsageError(f"{path} holds {len(secret)} bytes instead of {length}; restore it")
    return secret

"""
The settings of a gateway, read from its directory and from command options.

These settings of Tahoe-LAFS are read from the directory's ``tahoe.cfg`` or ``pipegrid.cfg``:

    [node]   web.port, web.static, tempdir
    [sftpd]  enabled, port, accounts.file, host_pubkey_file, host_privkey_file
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import expanded
from pipegrid.grid.strict_config import SettingsFile, read_config

DEFAULT_PORT = "tcp:3456:interface=127.0.0.1"
PASSWORDS_NAME = "private/.htpasswd"
"""Default password file of restic's users, relative to the gateway's directory."""

DEFAULT_SFTP_PORT = "tcp:8022:interface=127.0.0.1"


@attrs.frozen
class GatewayLimits:
    """
    Limits of connections, requests and downloads.

    Attributes:
        connections: maximum number of open connections; a further one closes the one that has been idle the
            longest, or is refused if none is idle.
        idle_s: time limit of a connection without a request, and of a pause while a body arrives.
        head_s: time limit for the whole head of a request.
        stalled_s: a client that reads nothing of a response for this long is disconnected.
        unread_bytes: maximum of response bytes held for all clients that have stopped reading; above this,
            the client that stopped first is disconnected.
        form_bytes: maximum size of a form's fields, without its files.
        text_bytes: maximum size of a request body that is a cap.
        children_bytes: maximum size of a request body that is JSON.
        mutable_bytes: maximum size of a mutable file that is written whole, or of a change at an offset; both
            are held in memory.
        downloads: how many downloads of more than 256 KiB run at the same time; others wait for their turn.
        archives: how many archives of directories are sent at the same time.
        spare_bytes: disk space that request bodies leave free.
    """

    connections: int = 2000
    idle_s: float = 300.0
    head_s: float = 60.0
    stalled_s: float = 600.0
    unread_bytes: int = 64 << 20
    form_bytes: int = 1 << 20
    text_bytes: int = 64 << 10
    children_bytes: int = 32 << 20
    mutable_bytes: int = 128 << 20
    spare_bytes: int = 64 << 20
    downloads: int = 4
    archives: int = 8


@attrs.frozen
class SftpSettings:
    """
    The port and the files of the SFTP server.

    Attributes:
        port: a Twisted endpoint description.
        accounts: path of the accounts file.
        public_key, private_key: paths of the host key, in OpenSSH's formats; created if missing.
    """

    port: str
    accounts: Path
    public_key: Path
    private_key: Path


@attrs.frozen
class ResticSettings:
    """
    What clients may do with repositories of restic.

    Attributes:
        password_file: users and password hashes, as ``htpasswd`` writes them; while the file does not exist,
            no client has access.
        append_only: clients can remove locks, but no other objects.
        private_repositories: a user has access only to repositories below the user's own name.
        no_auth: no password is required; only clients on this machine have access.
    """

    password_file: Path | None = None
    append_only: bool = False
    private_repositories: bool = False
    no_auth: bool = False


@attrs.frozen
class GatewaySettings:
    """
    The settings of a gateway.

    Attributes:
        directory: the client's directory; ``node.url`` and the token are written to it.
        port: a Twisted endpoint description.
        static: directory whose files are served below ``/static``.
        temporary: directory for request bodies that are too large for memory.
        hosts: names, in lower case, that are accepted in ``Host`` in addition to those of loopback.
        sftp: settings of SFTP; None: no SFTP server.
    """

    directory: Path
    port: str = DEFAULT_PORT
    static: Path = attrs.field(
        default=attrs.Factory(lambda self: self.directory / "public_html", True)
    )
    temporary: Path = attrs.field(default=attrs.Factory(lambda self: self.directory / "tmp", True))
    hosts: tuple[str, ...] = ()
    sftp: SftpSettings | None = None
    restic: ResticSettings = attrs.field(factory=ResticSettings)
    limits: GatewayLimits = attrs.field(factory=GatewayLimits)


def load_settings(
    directory: Path,
    *,
    port: str | None = None,
    hosts: tuple[str, ...] = (),
    restic: ResticSettings | None = None,
) -> GatewaySettings:
    """
    Return the settings of a gateway in a directory.

    Args:
        port: replaces the port that the directory configures; a number alone is a TCP port of the loopback
            interface.
        hosts, restic: see ``GatewaySettings``.

    Raises:
        UsageError: a setting is not valid.
    """
    _, parser = read_config(directory)
    given = _text(parser, "node", "web.port") if port is None else port.strip()
    if port is not None and given.isdecimal():  # in ``web.port``, a number means all interfaces
        given = f"tcp:{given}:interface=127.0.0.1"
    restic = restic or ResticSettings()
    if restic.password_file is None:
        restic = attrs.evolve(restic, password_file=directory / PASSWORDS_NAME)
    return GatewaySettings(
        directory,
        endpoint_of(given or DEFAULT_PORT),
        static=_place(parser, directory, "node", "web.static", "public_html"),
        temporary=_place(parser, directory, "node", "tempdir", "tmp"),
        hosts=tuple(host.strip().lower() for host in hosts),
        sftp=_sftp(parser, directory),
        restic=restic,
    )


def endpoint_of(text: str) -> str:
    """
    Return the Twisted endpoint description for a setting. As in Tahoe-LAFS, a TCP port can be written without
    ``tcp:``; a number alone is a TCP port on all interfaces.
    """
    text = text.strip()
    return f"tcp:{text}" if re.match("[0-9]", text) else text


def _sftp(parser: SettingsFile, directory: Path) -> SftpSettings | None:
    try:
        enabled = parser.getboolean("sftpd", "enabled", fallback=False)
    except ValueError:
        raise UsageError(f"{parser.at('sftpd', 'enabled')} must be true or false") from None
    if not enabled:
        return None
    return SftpSettings(
        endpoint_of(_text(parser, "sftpd", "port") or DEFAULT_SFTP_PORT),
        accounts=_place(parser, directory, "sftpd", "accounts.file", "private/accounts"),
        public_key=_place(
            parser, directory, "sftpd", "host_pubkey_file", "private/ssh_host_ed25519_key.pub"
        ),
        private_key=_place(
            parser, directory, "sftpd", "host_privkey_file", "private/ssh_host_ed25519_key"
        ),
    )


def _text(parser: SettingsFile, section: str, option: str) -> str:
    return parser.get(section, option, fallback="").strip()


def _place(
    parser: SettingsFile, directory: Path, section: str, option: str, otherwise: str
) -> Path:
    text = _text(parser, section, option)
    return expanded(text or otherwise, directory, parser.at(section, option))

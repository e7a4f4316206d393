"""
The settings of a gateway, from its directory and from command options.

The directory's ``tahoe.cfg`` or ``pipegrid.cfg`` has Tahoe-LAFS's settings:

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
"""Of restic's users, unless another file is named."""

DEFAULT_SFTP_PORT = "tcp:8022:interface=127.0.0.1"


@attrs.frozen
class GatewayLimits:
    """
    Limits of all clients together.

    Attributes:
        connections: open at a time; a further one closes the one that was idle the longest.
        idle_s: a connection without a request, or a body of which nothing arrives, is closed after this time.
        head_s: the whole head of a request must arrive within this time.
        stalled_s: a client that reads nothing of a response for this long is disconnected.
        unread_bytes: of responses, held for clients that have stopped reading; beyond that those that stopped
            first are disconnected.
        form_bytes: of a form's fields, except its file.
        text_bytes: of a request body that is a cap.
        children_bytes: of a request body that is JSON.
        mutable_bytes: of a mutable file that is written whole, or of a change at an offset, which are held in
            memory.
        downloads: of more than 256 KiB, fetched at the same time; they take turns.
        archives: of directories, sent at the same time.
        spare_bytes: of the disk, which request bodies leave free.
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
    Where the SFTP server listens, and its files.

    Attributes:
        port: a Twisted endpoint.
        accounts: the file of accounts.
        public_key, private_key: files of the host key, in OpenSSH's formats; created if missing.
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
        password_file: users and passwords, as ``htpasswd`` writes them; while it does not exist, no client
            has access.
        append_only: only locks can be removed.
        private_repositories: users have access only to repositories below their own names.
        no_auth: no passwords are required: all clients of this machine have access, and no others.
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
        directory: of the client; ``node.url`` and the token are written there.
        port: a Twisted endpoint.
        static: the directory that ``/static`` shows.
        temporary: the directory of request bodies that are too large for memory.
        hosts: names, in lower case, that requests may give as ``Host`` in addition to loopback's.
        sftp: None: no SFTP.
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
    Return the settings in a directory.

    Args:
        port: takes precedence over the directory's; a number alone is a port of the loopback interface.
        hosts, restic: see ``GatewaySettings``.

    Raises:
        UsageError: a setting is impossible.
    """
    _, parser = read_config(directory)
    given = _text(parser, "node", "web.port") if port is None else port.strip()
    if port is not None and given.isdecimal():  # unlike in Tahoe-LAFS's setting
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
    """Return the Twisted endpoint for a setting; a number is a TCP port, as in Tahoe-LAFS."""
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

"""
A table of every setting of a Tahoe-LAFS 1.20 node, and how PipeGrid treats each; none is ignored silently.

A setting is *followed*; or *refused*, if it is about privacy, trust or storage and PipeGrid cannot follow it;
or *not used*, if it is about a part of the node that PipeGrid does not have. An unknown name is refused: it
may be a mistyped privacy setting, and Tahoe-LAFS does not start with it either.

``check`` runs before any connection; ``docs/reference-tahoe-settings.md`` shows the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pipegrid.grid.client_paths import INTRODUCERS_NAME, SERVERS_NAME, TAHOE_CONFIG_NAME
from pipegrid.grid.strict_config import RefusedSetting, SettingsFile, closest_name, read_config
from pipegrid.grid.tor_socks_settings import (
    FALSE,
    SERVER_WAYS,
    TRUE,
    connection_policy,
)
from pipegrid.reactor.connection_policy import parse_proxy_address

Role = Literal["client", "server"]
Treatment = Literal["followed", "refused", "reported", "not used"]
SectionValues = Mapping[str, str]
RefusalRule = Callable[[str, SectionValues], "str | None"]
"""A function of a value and all settings of its section: returns why the value is refused, or None."""

BLACKLIST_NAME = "access.blacklist"
MAX_MANAGERS = 16

_MANAGER_KEY = re.compile(r"pub-v0-[a-z2-7]{52}\Z")
_USE_TAHOE = "use Tahoe-LAFS with this node"


class Setting(NamedTuple):
    """
    One setting.

    Attributes:
        section: the section of ``tahoe.cfg``, or the name of a file.
        name: the name of the setting; ``*``: every name in the section, since the user chooses them.
        client: how client commands treat the setting.
        server: how ``serve`` treats the setting.
        note: the meaning of the setting, or the reason for its treatment.
        refuses: decides which values are refused; None: no value is refused, apart from checks in other
            modules.
    """

    section: str
    name: str
    client: Treatment
    server: Treatment
    note: str
    refuses: RefusalRule | None = None


def _flag(value: str, _section: SectionValues) -> str | None:
    return None if value.lower() in (*TRUE, *FALSE) else "it is neither true nor false; correct it"


def _tcp(value: str, _section: SectionValues) -> str | None:
    if value.lower() in ("tcp", "tor", "socks", "disabled"):
        return None
    return "it must be tcp, tor, socks or disabled; correct it"


def _proxy(value: str, _section: SectionValues) -> str | None:
    try:
        if value:
            parse_proxy_address(value)
    except ValueError as problem:
        return f"{problem}; correct it"
    return None


def _i2p(value: str, _section: SectionValues) -> str | None:
    return None if value.lower() in FALSE else f"PipeGrid does not use I2P; {_USE_TAHOE}"


def _i2p_place(value: str, section: SectionValues) -> str | None:
    if not value or section.get("enabled", "").strip().lower() in FALSE:
        return None
    return f"PipeGrid does not use I2P; {_USE_TAHOE}, or set [i2p] enabled = false"


def _helper(value: str, _section: SectionValues) -> str | None:
    if value in ("", "None"):
        return None
    return (
        "PipeGrid uploads to storage servers directly and never through a helper; remove the setting if that "
        "is right"
    )


def _plugins(value: str, _section: SectionValues) -> str | None:
    return f"PipeGrid has no storage plugins; {_USE_TAHOE}" if value.strip(", \t") else None


def _format(value: str, _section: SectionValues) -> str | None:
    return None if value.lower() in ("sdmf", "mdmf") else "it must be SDMF or MDMF; correct it"


def _manager(value: str, section: SectionValues) -> str | None:
    if not _MANAGER_KEY.match(value):
        return "a grid manager's public key is pub-v0- and 52 characters; copy it again"
    if len(section) > MAX_MANAGERS:
        return f"more than {MAX_MANAGERS} grid managers are not supported; remove some"
    return None


def _discards(value: str, _section: SectionValues) -> str | None:
    return None if not value or value.lower() in FALSE else "PipeGrid keeps shares; remove it"


def _rows(
    section: str,
    names: str,
    client: Treatment,
    server: Treatment,
    note: str,
    refuses: RefusalRule | None = None,
) -> tuple[Setting, ...]:
    return tuple(Setting(section, name, client, server, note, refuses) for name in names.split())


_OLD = "of earlier versions of Tahoe-LAFS"

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "node",
        "reveal-IP-address",
        "followed",
        "followed",
        "`false`: only with `tcp = tor`, `socks` or `disabled`; `serve` announces no TCP address",
        _flag,
    ),
    Setting("node", "nickname", "followed", "followed", "its name, for introducers"),
    *_rows("node", "tub.port tub.location", "not used", "followed", "where the node listens"),
    *_rows("node", "web.port web.static", "not used", "not used", "followed by `gateway`"),
    *_rows("node", "tempdir", "not used", "not used", "followed by `gateway`, for request bodies"),
    *_rows("node", "log_gatherer.furl", "not used", "not used", "where the node sends its log"),
    *_rows(
        "node",
        "timeout.keepalive timeout.disconnect",
        "not used",
        "not used",
        "PipeGrid has [its own limits](reference-limits.md)",
    ),
    Setting(
        "connections",
        "tcp",
        "followed",
        "followed",
        "`tcp`, `tor`, or `disabled`; `socks` in `pipegrid.cfg`",
        _tcp,
    ),
    Setting("tor", "enabled", "followed", "followed", "whether Tor may be used", _flag),
    Setting("tor", "socks.port", "followed", "followed", "where Tor listens", _proxy),
    Setting("tor", "control.port", "followed", "followed", "tells where Tor listens", _proxy),
    Setting("tor", "launch", "followed", "followed", "start a Tor of its own", _flag),
    *_rows("tor", "tor.executable", "followed", "followed", "which program to start"),
    Setting("tor", "onion", "not used", "followed", "whether it is an onion service", _flag),
    *_rows(
        "tor",
        "onion.local_port onion.external_port onion.private_key_file",
        "not used",
        "followed",
        "its ports, and its key",
    ),
    *_rows("i2p", "enabled launch dest", "refused", "refused", "`false` passes", _i2p),
    *_rows(
        "i2p",
        "sam.port i2p.configdir",
        "refused",
        "refused",
        "passes with `enabled = false`",
        _i2p_place,
    ),
    *_rows(
        "i2p",
        "i2p.executable dest.port dest.private_key_file",
        "not used",
        "not used",
        "details of what is refused",
    ),
    *_rows(
        "client",
        "shares.needed shares.total shares.happy",
        "followed",
        "not used",
        "how files are encoded",
    ),
    Setting(
        "client",
        "shares._max_immutable_segment_size_for_testing",
        "followed",
        "not used",
        "size of segments",
    ),
    Setting("client", "peers.preferred", "followed", "not used", "servers that come first"),
    Setting("client", "force_foolscap", "followed", "not used", "no HTTPS"),
    Setting("client", "introducer.furl", "followed", "followed", "an additional introducer"),
    Setting(
        "client",
        "mutable.format",
        "followed",
        "not used",
        "SDMF or MDMF, for new mutable files and directories",
        _format,
    ),
    Setting(
        "client", "helper.furl", "refused", "not used", "uploads never go through a helper", _helper
    ),
    Setting(
        "client", "storage.plugins", "refused", "not used", "how servers admit the client", _plugins
    ),
    Setting("client", "key_generator.furl", "not used", "not used", "Tahoe-LAFS ignores it, too"),
    Setting(
        "grid_managers",
        "*",
        "followed",
        "not used",
        "uploads go only to servers that one of them has certified",
        _manager,
    ),
    Setting(
        "storageclient.plugins.*", "*", "not used", "not used", "of plugins, which are refused"
    ),
    Setting("storage", "enabled", "not used", "refused", "`true` passes"),
    Setting("storage", "anonymous", "not used", "refused", "`true` passes"),
    Setting("storage", "debug_discard", "not used", "refused", "`false` passes", _discards),
    *_rows(
        "storage",
        "storage_dir reserved_space readonly",
        "not used",
        "followed",
        "where shares are stored, and how many",
    ),
    *_rows(
        "storage",
        "expire.enabled expire.mode expire.override_lease_duration expire.cutoff_date expire.immutable "
        "expire.mutable",
        "not used",
        "followed",
        "which shares are removed",
    ),
    Setting("storage", "force_foolscap", "not used", "followed", "no HTTPS is announced"),
    Setting(
        "storage", "grid_management", "not used", "followed", "whether certificates are announced"
    ),
    Setting("storage", "plugins", "not used", "reported", "left out, with a warning"),
    Setting("grid_manager_certificates", "*", "not used", "followed", "files of certificates"),
    Setting(
        "storageserver.plugins.*", "*", "not used", "not used", "of plugins, which are left out"
    ),
    *_rows(
        "sftpd",
        "enabled accounts.file port host_pubkey_file host_privkey_file",
        "not used",
        "not used",
        "followed by `gateway`",
    ),
    Setting("helper", "enabled", "not used", "not used", "the node's helper for other clients"),
    *_rows("drop_upload", "enabled upload.dircap local.directory", "not used", "not used", _OLD),
    *_rows(
        "magic_folder",
        "enabled download.umask local.directory poll_interval",
        "not used",
        "not used",
        _OLD,
    ),
    *_rows("ftpd", "enabled port accounts.file accounts.url", "not used", "not used", _OLD),
    *_rows("sftpd", "accounts.url", "not used", "not used", _OLD),
    *_rows("client", "stats_gatherer.furl", "not used", "not used", _OLD),
    *_rows(
        "node",
        "ssh.port ssh.authorized_keys_file web.reveal_storage_furls web.ambient_upload_authority",
        "not used",
        "not used",
        _OLD,
    ),
)
"""The settings of ``tahoe.cfg``."""

_ANN = "storage: ID: ann: "

FILE_SETTINGS: tuple[Setting, ...] = (
    Setting(
        SERVERS_NAME,
        "storage: ID: connections",
        "followed",
        "not used",
        "the way to this server: `tcp: tcp`, `tcp: tor` or `tcp: disabled`; others are refused",
    ),
    *(
        Setting(SERVERS_NAME, _ANN + name, "followed", "not used", note)
        for name, note in (
            ("anonymous-storage-FURL", "where it speaks Foolscap, over TCP or Tor"),
            ("anonymous-storage-NURLs", "where it speaks HTTPS, over TCP or Tor"),
            ("nickname", "its name"),
            ("permutation-seed-base32", "its place on the permuted ring"),
            ("grid-manager-certificates", "see `[grid_managers]`"),
        )
    ),
    Setting(
        SERVERS_NAME,
        _ANN + "storage-options",
        "not used",
        "not used",
        "of plugins; without another address the server is left out, with a warning",
    ),
    Setting(INTRODUCERS_NAME, "introducers: NAME: furl", "followed", "followed", "an introducer"),
    Setting(
        BLACKLIST_NAME,
        "*",
        "refused",
        "not used",
        "files that the node gives to no user; an empty list passes, and `gateway` follows any",
    ),
)
"""The settings in other files of a node."""

CONNECTIONS = "connections"
_ENTRY_KEYS = ("ann", CONNECTIONS)
_KNOWN: dict[str, dict[str, Setting]] = {}
for _each in SETTINGS:
    _KNOWN.setdefault(_each.section, {})[_each.name.lower()] = _each


def section_of(name: str) -> Mapping[str, Setting] | None:
    """Return the settings of a section of ``tahoe.cfg``; None if there is no such section."""
    for kind in ("storageclient.plugins.", "storageserver.plugins."):
        if name.startswith(kind):
            return _KNOWN[kind + "*"]
    return _KNOWN.get(name)


def checked_config(
    directory: Path, role: Role, follows_blacklist: bool = False
) -> tuple[Path, SettingsFile]:
    """
    Return the path and the settings of a directory's configuration file, after ``check``.

    Args:
        follows_blacklist: the caller blocks the files that ``access.blacklist`` names, so the list may have
            entries.

    Raises:
        UsageError: there is no such file, it cannot be parsed, or a setting is refused.
    """
    path, parser = read_config(directory)
    is_tahoe = path.name == TAHOE_CONFIG_NAME
    check(parser, role, names=is_tahoe)
    connection_policy(parser, is_tahoe)  # raises if the settings contradict each other
    if is_tahoe and role == "client" and not follows_blacklist:
        check_blacklist(directory)
    return path, parser


def check(parser: SettingsFile, role: Role, names: bool = True) -> None:
    """
    Check every setting of a ``tahoe.cfg``, before anything is sent.

    Args:
        names: whether unknown names are refused; False for ``pipegrid.cfg``, whose own names are checked
            separately.

    Raises:
        RefusedSetting: a setting is unknown, or cannot be followed.
    """
    for section in parser.sections():
        known = section_of(section)
        if known is None and not names:
            continue
        if known is None:
            raise RefusedSetting(
                f"{parser.at_section(section)}: Tahoe-LAFS knows no section [{section}]"
                f"{closest_name(section, _KNOWN)}; correct it, or remove it"
            )
        values = dict(parser.items(section))
        for name, value in values.items():
            setting = known.get(name) or known.get("*")
            if setting is None and not names:
                continue
            if setting is None:
                hint = closest_name(name, [each.name for each in known.values()])
                raise RefusedSetting(
                    f"{parser.at(section, name)} is not a setting that Tahoe-LAFS knows{hint}; "
                    "correct it, or remove it"
                )
            is_used = (setting.client if role == "client" else setting.server) != "not used"
            reason = setting.refuses(value.strip(), values) if setting.refuses and is_used else None
            if reason is not None:
                shown = name if setting.name == "*" else setting.name
                raise RefusedSetting(
                    f"{parser.at(section, shown)} is {_short(value)!r}, and {reason}; nothing was sent"
                )


def check_entry(server_id: object, entry: object, name: str) -> list[str]:
    """
    Check the settings next to the announcement in an entry of ``servers.yaml``.

    Args:
        name: the file's name, for errors.

    Returns:
        A warning for each unknown name.

    Raises:
        RefusedSetting: the entry requires an unknown way to reach the server.
    """
    where = f"{name}: server {str(server_id)[:60]!r}"
    warnings = []
    for key, value in entry.items() if isinstance(entry, dict) else ():
        if key == CONNECTIONS:
            _check_connections(where, value)
        elif key not in _ENTRY_KEYS:
            text = str(key)[:60]
            hint = closest_name(text, _ENTRY_KEYS)
            if CONNECTIONS in hint:
                raise RefusedSetting(
                    f"{where}: {text!r} is not read{hint}; correct it; nothing was sent"
                )
            warnings.append(f"{where}: {text!r} is not read{hint}")
    return warnings


def _check_connections(where: str, value: object) -> None:
    ways = value if isinstance(value, dict) else {"": value}
    for kind, way in ways.items():
        known = SERVER_WAYS if kind == "tcp" else (kind,) if kind in ("tor", "i2p") else ()
        if value is not None and way not in known:
            shown = f"{_short(str(kind))}: {_short(str(way))}" if kind else _short(str(way))
            raise RefusedSetting(
                f"{where}: its 'connections' are {shown!r}, and only 'tcp: tcp', 'tcp: tor' and 'tcp: "
                "disabled' are supported; correct it, or remove the server; nothing was sent"
            )


def check_blacklist(directory: Path) -> None:
    """
    Check that the node has no list of forbidden files (``access.blacklist``), or an empty one.

    Raises:
        RefusedSetting: the list has entries, or cannot be read.
    """
    path = directory / BLACKLIST_NAME
    try:
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(1 << 16), b""):
                if line.strip() and not line.lstrip().startswith(b"#"):
                    raise RefusedSetting(
                        f"{path} forbids access to files, and PipeGrid does not follow it; {_USE_TAHOE}; "
                        "nothing was sent"
                    )
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise RefusedSetting(
            f"cannot read {path}: {error.strerror}; it may forbid access to files; nothing was sent"
        ) from None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."

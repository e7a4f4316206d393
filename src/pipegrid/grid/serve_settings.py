"""The storage server's settings in a node's directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import attrs

from pipegrid.errors import UsageError
from pipegrid.grid.client_config import nickname_of, old_introducer, parse_kept
from pipegrid.grid.client_paths import TAHOE_CONFIG_NAME, expanded, is_configured
from pipegrid.grid.introducer_settings import (
    TAC_NAME,
    configured_location,
    configured_port,
    detected_location,
    detected_port,
    is_unsupported,
)
from pipegrid.grid.servers_and_introducers_yaml import load_introducers
from pipegrid.grid.strict_config import SettingsFile
from pipegrid.grid.tahoe_settings_check import checked_config
from pipegrid.grid.tor_socks_settings import (
    TRUE,
    connection_policy,
    control_address,
    launched_tor,
)
from pipegrid.reactor.connection_policy import (
    DIRECT_CONNECTIONS,
    Find,
    ProxyAddress,
    ProxyWay,
    RefusedWay,
    parse_proxy_address,
)
from pipegrid.reactor.tor_control_port import TorControl
from pipegrid.server.identity import FURL_NAME, INTRODUCER_FURL_NAME
from pipegrid.server.listener import MAX_CONNECTIONS
from pipegrid.server.onion_service import KEY_NAME, OnionSettings
from pipegrid.server.serve import ServeSettings
from pipegrid.server.server_certificates import read_certificate
from pipegrid.storage.share_file import Expiry
from pipegrid.wire.server_address import Furl

# ``pipegrid serve`` follows the ``tahoe.cfg`` of a Tahoe-LAFS storage node as Tahoe-LAFS does, so it can
# replace the node. ``pipegrid.cfg`` has the same settings under the same names:
#
#     [node]     nickname, tub.port, tub.location
#     [storage]  enabled, anonymous, storage_dir, reserved_space, quota, readonly, force_foolscap,
#                keep_unfinished, expire.enabled, expire.mode, expire.override_lease_duration,
#                expire.cutoff_date, expire.immutable, expire.mutable, grid_management, plugins, announce
#     [grid_manager_certificates]
#
# ``quota``, ``keep_unfinished`` and ``announce`` exist only in ``pipegrid.cfg``: Tahoe-LAFS does not start
# with a setting that it does not know.
#
# In a Tahoe-LAFS node's directory, or with ``announce``, the server announces itself to the introducers of
# its directory. A setting that cannot be followed is refused, never guessed: a wrong guess might delete
# shares or make them impossible to find.

T = TypeVar("T")

_SIZE = re.compile(r"([0-9]{1,15})\s*([kmgtpe]?)(i?)b?\Z", re.I)
_DURATION = re.compile(r"([0-9]{1,9})\s*(s|second|day|mo|month|year)s?\Z", re.I)
_DURATION_S = {"s": 1, "second": 1, "day": 86400, "month": 31 * 86400, "year": 365 * 86400}


@attrs.frozen
class ServerDirectory:
    """
    The server's settings in a directory.

    Attributes:
        settings: fields of ``ServeSettings`` by name; only those that the directory sets.
        introducers: the introducers' fURLs, by the names that are used in the log.
        is_tahoe: whether the directory is a Tahoe-LAFS node's.
        warnings: a sentence for each entry that is skipped.
        announce: whether ``[storage] announce`` is true.
        tor_control: Tor's control port, if the directory names it, else None.
        find_control: starts Tor and finds its control port; None if the directory's settings start no Tor.
        detected: the fields that were detected or chosen at an earlier start, instead of set by the user.
    """

    settings: Mapping[str, Any] = attrs.field(factory=dict)
    introducers: Mapping[str, Furl] = attrs.field(factory=dict)
    is_tahoe: bool = False
    warnings: tuple[str, ...] = ()
    announce: bool = False
    tor_control: ProxyAddress | None = None
    detected: frozenset[str] = frozenset()
    find_control: Find | None = None

    @property
    def announces(self) -> bool:
        """Whether the settings alone make the server announce itself to the introducers."""
        return self.is_tahoe or self.announce

    def without_detected(self) -> ServerDirectory:
        """Return the settings without detected fields, so only with those that the user has set."""
        said = {name: value for name, value in self.settings.items() if name not in self.detected}
        return attrs.evolve(self, settings=said)

    def onion_settings(
        self, directory: Path, port: str | None, control: str | None
    ) -> dict[str, Any]:
        """
        Return the fields of ``ServeSettings`` for a server that is an onion service and hides its address.

        Args:
            port: the endpoint to listen on; None: any free port, reachable only from this machine.
            control: Tor's control port; None: the directory's, or the usual ones.

        Raises:
            UsageError: ``control`` is not an address, or the directory's settings permit no Tor.
        """
        try:
            address = parse_proxy_address(control) if control else self.tor_control
        except ValueError as error:
            raise UsageError(
                f"the address of Tor's control port is {control!r}, and {error}"
            ) from None
        onion = self.settings.get("onion", OnionSettings(directory / KEY_NAME))
        if address is not None:
            onion = attrs.evolve(onion, control=(address,), find_control=None)
        elif self.find_control is not None:
            onion = attrs.evolve(onion, find_control=self.find_control)
        policy = self.settings.get("connections", DIRECT_CONNECTIONS)
        if isinstance(policy.tor, RefusedWay):
            raise UsageError(
                f"an onion service needs Tor, and {policy.tor.reason}; correct one of them"
            )
        if control and address is not None:
            way = ProxyWay("Tor", (), True, find=TorControl(address).socks_addresses)
            policy = policy._replace(tor=way)
        if policy.is_direct:
            policy = policy._replace(tcp=policy.tor)
        return {
            "port": port or "tcp:0:interface=127.0.0.1",
            "onion": onion,
            "connections": policy._replace(hides_address=True),
            "max_per_address": self.settings.get("max_per_address", MAX_CONNECTIONS),
        }

    def serve_settings(self, directory: Path, **chosen: Any) -> ServeSettings:
        """Return complete settings; the caller's values, if not None, replace those of the directory."""
        given = {name: value for name, value in chosen.items() if value is not None}
        # In a Tahoe-LAFS node's directory, the server runs no introducer, so it writes no file for one.
        said = {"introduces": not self.is_tahoe, **self.settings, **given}
        return ServeSettings(directory=directory, **said)


def load(directory: Path) -> ServerDirectory:
    """
    Return the server's settings in a node's directory; if it is not configured, only its introducers.

    Raises:
        UsageError: the directory is an introducer's, a file cannot be parsed, or a setting cannot be
            followed.
    """
    for name in (TAC_NAME, f"private/{INTRODUCER_FURL_NAME}"):
        if (directory / name).exists():
            raise UsageError(
                f"{directory} is an introducer's directory, since it has {name}; give the server another"
            )
    if not is_configured(directory):
        found = load_introducers(directory)
        return ServerDirectory({}, {each.name: each.furl for each in found.addresses})
    path, parser = checked_config(directory, "server")
    introducers = load_introducers(directory, old_introducer(parser))
    policy = connection_policy(parser, path.name == TAHOE_CONFIG_NAME)
    reader = _Reader(directory, path, parser)
    return ServerDirectory(
        {**reader.settings(), "connections": policy},
        {each.name: each.furl for each in introducers.addresses},
        path.name == TAHOE_CONFIG_NAME,
        (*introducers.warnings, *reader.warnings),
        reader.flag("announce", False),
        control_address(parser),
        frozenset(reader.detected),
        reader.find_control(),
    )


class _Reader:
    """Reads one configuration file. Every error names the file, the section and the option."""

    def __init__(self, directory: Path, path: Path, parser: SettingsFile) -> None:
        self.warnings: list[str] = []
        self.detected: set[str] = set()
        self._directory = directory
        self._path = path
        self._parser = parser

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``ServeSettings`` that the file sets."""
        if not self.flag("enabled", True):
            raise self._wrong("storage", "enabled", "is false: the node serves no storage; set it")
        if not self.flag("anonymous", True):
            raise self._wrong("storage", "anonymous", "is false, which is not known here; set it")
        if self._text("plugins"):
            self.warnings.append(f"{self._path}: [storage] plugins are not served, only storage is")
        storage = self._text("storage_dir")
        found = {
            "port": self._port(),
            "location": self._location(),
            "nickname": nickname_of(self._parser) or None,
            "storage": self._place(storage, "storage", "storage_dir") if storage else None,
            "reserved_bytes": self._parsed("reserved_space", parse_size),
            "quota_bytes": self._parsed("quota", parse_size),
            "keep_unfinished_s": self._parsed("keep_unfinished", parse_kept),
            "read_only": self.flag("readonly", False) or None,
            "expiry": self._expiry(),
            "announce_nurls": not self.flag("force_foolscap", False),
            "certificate_files": self._certificate_files(),
            "onion": self._onion(),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _port(self) -> str | None:
        text = configured_port(self._parser, "server")
        if not text:
            self.detected.add("port")
            return detected_port(self._directory)
        if text == "listen:tor" and self._onion() is not None:
            local = self._port_number("onion.local_port")
            return f"tcp:{local}:interface=127.0.0.1"
        if is_unsupported(text):
            raise self._wrong(
                "node",
                "tub.port",
                f"is {text!r}: onion services are started with 'pipegrid serve --tor' or [tor] onion = "
                "true, and no I2P services; listen on a TCP port",
            )
        return text

    def _onion(self) -> OnionSettings | None:
        """Return the onion service of a Tahoe-LAFS node; None if it has none."""
        if self._text("onion", "tor").lower() not in TRUE:
            return None
        control = control_address(self._parser)
        find = self.find_control()
        if control is None and find is None:
            raise self._wrong("tor", "onion", "is true, and [tor] control.port is missing; add it")
        name = self._text("onion.private_key_file", "tor")
        if not name:
            raise self._wrong("tor", "onion.private_key_file", "is missing; add it")
        key = self._place(name, "tor", "onion.private_key_file")
        ways = () if control is None else (control,)
        return OnionSettings(key, ways, self._port_number("onion.external_port"), find)

    def find_control(self) -> Find | None:
        """
        Return a function that starts Tor and finds its control port; None if the settings do not start Tor.
        """
        if self._text("launch", "tor").lower() not in TRUE:
            return None
        return launched_tor(self._parser).control_addresses

    def _port_number(self, option: str) -> int:
        text = self._text(option, "tor")
        if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 1 << 16):
            raise self._wrong("tor", option, f"is {text!r}, and not a port; correct it")
        return int(text)

    def _location(self) -> str | None:
        if location := configured_location(self._parser, "server"):
            return location
        self.detected.add("location")
        return detected_location(self._directory, FURL_NAME)

    def _expiry(self) -> Expiry | None:
        if not self.flag("expire.enabled", False):
            return None
        kinds = (self.flag("expire.immutable", True), self.flag("expire.mutable", True))
        mode = self._text("expire.mode")
        if mode == "age":
            return Expiry(
                self._parsed("expire.override_lease_duration", parse_duration), None, *kinds
            )
        if mode == "cutoff-date":
            since = self._parsed("expire.cutoff_date", parse_date)
            if since is not None:
                return Expiry(None, since, *kinds)
            raise self._wrong("storage", "expire.cutoff_date", "is missing; set it")
        raise self._wrong(
            "storage", "expire.mode", f"is {mode!r}; it must be 'age' or 'cutoff-date'"
        )

    def _certificate_files(self) -> tuple[Path, ...]:
        section = "grid_manager_certificates"
        if not self.flag("grid_management", False) or not self._parser.has_section(section):
            return ()
        found = []
        for name in self._parser.options(section):
            path = self._place(self._text(name, section), section, name)
            try:
                read_certificate(path)
            except UsageError as error:
                raise self._wrong(section, name, f"cannot be followed: {error}") from None
            found.append(path)
        return tuple(found)

    def _place(self, text: str, section: str, option: str) -> Path:
        return expanded(text, self._directory, self._parser.at(section, option))

    def _text(self, option: str, section: str = "storage") -> str:
        return self._parser.get(section, option, fallback="").strip()

    def flag(self, option: str, default: bool) -> bool:
        """
        Return a setting of ``[storage]`` that is true or false; ``default`` if the file does not set it.
        """
        if not self._text(option):
            return default
        try:
            return self._parser.getboolean("storage", option)
        except ValueError:
            raise self._wrong("storage", option, "is neither true nor false; correct it") from None

    def _parsed(self, option: str, parse: Callable[[str], T]) -> T | None:
        text = self._text(option)
        if not text:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise self._wrong("storage", option, f"is {text!r}; {error}") from None

    def _wrong(self, section: str, option: str, what: str) -> UsageError:
        return UsageError(f"{self._parser.at(section, option)} {what}")


def parse_size(text: str) -> int:
    """
    Return the number of bytes in a text with Tahoe-LAFS's units: ``1G`` and ``1GB`` are 10^9, ``1GiB`` is
    2^30.

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError("it must be a size such as 1G or 500MiB")
    power = " kmgtpe".index(match[2].lower() or " ")
    unit: int = (1024 if match[3] else 1000) ** power
    return int(match[1]) * unit


def parse_duration(text: str) -> int:
    """
    Return a duration in seconds; a month has 31 days, and a year 365.

    Raises:
        ValueError: the text is not a duration.
    """
    match = _DURATION.match(text)
    if match is None:
        raise ValueError("it must be a duration such as '60 days', '2 months' or '1 year'")
    unit = match[2].lower()
    return int(match[1]) * _DURATION_S["month" if unit == "mo" else unit]


def parse_date(text: str) -> int:
    """
    Return the beginning of a day (UTC), in seconds since 1970.

    Raises:
        ValueError: the text is not a date.
    """
    try:
        day = datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise ValueError("it must be a date such as 2026-01-31") from None
    return int(day.replace(tzinfo=timezone.utc).timestamp())

"""
Reads the connection policy of a directory: ``[connections]``, ``[tor]``, ``[socks]`` and
``reveal-IP-address``.

The names and meanings are those of Tahoe-LAFS; ``[socks]`` and ``tcp = socks`` exist only in
``pipegrid.cfg``. A setting that cannot be followed raises an error before anything is sent.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipegrid.grid.client_paths import TAHOE_CONFIG_NAME, cache_directory
from pipegrid.grid.strict_config import RefusedSetting, SettingsFile
from pipegrid.reactor.connection_policy import (
    ConnectionPolicy,
    DirectWay,
    Find,
    ProxyAddress,
    ProxyWay,
    RefusedWay,
    Way,
    parse_proxy_address,
    usual_tor,
)

if TYPE_CHECKING:
    from pipegrid.grid.tor_process import LaunchedTor

TRUE = ("1", "yes", "true", "on")
FALSE = ("0", "no", "false", "off")

SERVER_WAYS = ("tcp", "tor", "disabled")
"""The permitted values of ``connections: {tcp: …}`` in a server's entry."""

_COPIED = {
    "node": ("reveal-IP-address",),
    "connections": ("tcp",),
    "tor": ("enabled", "socks.port", "control.port", "launch", "tor.executable"),
    "socks": ("port", "username", "password"),
}
_SENT = "nothing was sent"


def connection_policy(parser: SettingsFile, is_tahoe: bool) -> ConnectionPolicy:
    """
    Return the connection policy in the settings of a directory.

    Args:
        is_tahoe: whether the file is a ``tahoe.cfg``.

    Raises:
        RefusedSetting: a value is not valid, or the settings contradict each other.
    """
    hides = not _flag(parser, "node", "reveal-IP-address", True)
    tor = _tor(parser)
    tcp = parser.get("connections", "tcp", fallback="tcp").strip().lower()
    shown = f"{parser.at('connections', 'tcp')} is {tcp!r}"
    way: Way
    if tcp == "tcp":
        way = DirectWay()
    elif tcp == "tor":
        if isinstance(tor, RefusedWay):
            raise RefusedSetting(f"{shown}, but {tor.reason}; change one of them; {_SENT}")
        way = tor
    elif tcp == "socks" and is_tahoe:
        raise RefusedSetting(
            f"{shown}, which Tahoe-LAFS does not know; make a directory of its own with 'pipegrid init "
            f"--tahoe'; {_SENT}"
        )
    elif tcp == "socks":
        way = _socks(parser, shown)
    elif tcp == "disabled":
        way = RefusedWay("[connections] tcp is 'disabled'")
    else:
        raise RefusedSetting(
            f"{shown}, and it must be tcp, tor, socks or disabled; correct it; {_SENT}"
        )
    if hides and isinstance(way, DirectWay):
        raise RefusedSetting(
            f"{parser.at('node', 'reveal-IP-address')} is false, but [connections] tcp = tcp reveals the IP "
            f"address to every server; set it to tor; {_SENT}"
        )
    return ConnectionPolicy(way, tor, hides)


def policy_for_server(policy: ConnectionPolicy, way: str, where: str) -> ConnectionPolicy:
    """
    Return the policy for one server, whose entry has ``connections: {tcp: WAY}``.

    Args:
        way: one of ``SERVER_WAYS``.
        where: the beginning of an error: the file and the server.

    Raises:
        RefusedSetting: the way reveals the IP address, which must be hidden; or needs Tor, which is not used.
    """
    if way == "tcp":
        if policy.hides_address:
            raise RefusedSetting(
                f"{where}: its 'connections' are 'tcp: tcp', but [node] reveal-IP-address is false; correct "
                f"one of them; {_SENT}"
            )
        return policy._replace(tcp=DirectWay())
    if way == "tor":
        if isinstance(policy.tor, RefusedWay):
            raise RefusedSetting(
                f"{where}: its 'connections' are 'tcp: tor', but {policy.tor.reason}; correct one of them; "
                f"{_SENT}"
            )
        return policy._replace(tcp=policy.tor)
    return policy._replace(tcp=RefusedWay("its 'connections' in servers.yaml are 'tcp: disabled'"))


def _tor(parser: SettingsFile) -> Way:
    if not _flag(parser, "tor", "enabled", True):
        return RefusedWay("[tor] enabled is false")
    if _flag(parser, "tor", "launch", False):
        return ProxyWay("Tor", (), True, find=launched_tor(parser).socks_addresses, starts=True)
    if address := _address(parser, "tor", "socks.port"):
        return ProxyWay("Tor", (address,), True)
    if control := control_address(parser):
        return ProxyWay("Tor", (), True, find=_found_by_control(control))
    return usual_tor()


def control_address(parser: SettingsFile) -> ProxyAddress | None:
    """
    Return the address of Tor's control port in the settings; None if it is not set.

    Raises:
        RefusedSetting: the value is not an address.
    """
    return _address(parser, "tor", "control.port")


_LAUNCHED: dict[tuple[Path, str], LaunchedTor] = {}
"""The Tor of each directory and executable, since all connections of a process share one Tor."""


def launched_tor(parser: SettingsFile) -> LaunchedTor:
    """
    Return the Tor of a client's directory, which starts when it is first needed.

    Raises:
        RefusedSetting: txtorcon is not installed.
    """
    # Imported here since most clients start no Tor.
    from pipegrid.grid.tor_process import LaunchedTor
    from pipegrid.reactor.tor_control_port import MISSING_LIBRARY

    if find_spec("txtorcon") is None:
        raise RefusedSetting(f"{MISSING_LIBRARY}; or set [tor] socks.port; {_SENT}")
    place = parser.path.parent.absolute() / "private"
    if parser.path.name == TAHOE_CONFIG_NAME:
        place = cache_directory()
    executable = parser.get("tor", "tor.executable", fallback="").strip()
    return _LAUNCHED.setdefault((place, executable), LaunchedTor(place, executable))


def _found_by_control(control: ProxyAddress) -> Find:
    # Imported here since most clients do not use a control port.
    from pipegrid.reactor.tor_control_port import MISSING_LIBRARY, TorControl

    if find_spec("txtorcon") is None:
        raise RefusedSetting(f"{MISSING_LIBRARY}; or set [tor] socks.port; {_SENT}")
    return TorControl(control).socks_addresses


def _socks(parser: SettingsFile, shown: str) -> ProxyWay:
    address = _address(parser, "socks", "port")
    if address is None:
        raise RefusedSetting(f"{shown}, and [socks] port is missing; add it; {_SENT}")
    username, password = (
        parser.get("socks", name, fallback="").strip() for name in ("username", "password")
    )
    for name, text in (("username", username), ("password", password)):
        if len(text.encode("utf-8")) > 255:
            raise RefusedSetting(
                f"{parser.at('socks', name)} has more than 255 bytes; correct it; {_SENT}"
            )
    if password and not username:
        raise RefusedSetting(
            f"{parser.at('socks', 'password')} is given, and [socks] username is missing; add it; {_SENT}"
        )
    return ProxyWay("the SOCKS proxy", (address,), False, username, password)


def _address(parser: SettingsFile, section: str, name: str) -> ProxyAddress | None:
    text = parser.get(section, name, fallback="").strip()
    try:
        return parse_proxy_address(text) if text else None
    except ValueError as problem:
        raise RefusedSetting(
            f"{parser.at(section, name)} is {text[:60]!r}, and {problem}; correct it; {_SENT}"
        ) from None


def _flag(parser: SettingsFile, section: str, name: str, default: bool) -> bool:
    text = parser.get(section, name, fallback="true" if default else "false").strip().lower()
    if text not in (*TRUE, *FALSE):
        raise RefusedSetting(
            f"{parser.at(section, name)} is {text[:60]!r}, and it is neither true nor false; correct it; "
            f"{_SENT}"
        )
    return text in TRUE


def settings_to_copy(parser: SettingsFile) -> dict[str, dict[str, str]]:
    """Return the connection settings that are set, by section and name, with unchanged values."""
    found: dict[str, dict[str, str]] = {}
    for section, names in _COPIED.items():
        for name in names:
            if text := parser.get(section, name, fallback="").strip():
                found.setdefault(section, {})[name] = text
    return found

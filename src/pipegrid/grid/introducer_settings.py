"""The settings of an introducer in a node's directory, which Tahoe-LAFS can run as well."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from pipegrid.core.text import decode_text
from pipegrid.disk.atomic_write import create_file
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import (
    CONFIG_NAME,
    INTRODUCERS_NAME,
    SERVERS_NAME,
    TAHOE_CONFIG_NAME,
    default_directory,
)
from pipegrid.grid.servers_and_introducers_yaml import read_bounded
from pipegrid.grid.strict_config import RefusedSetting, SettingsFile, read_config
from pipegrid.grid.tahoe_settings_check import check
from pipegrid.grid.tor_socks_settings import FALSE, TRUE
from pipegrid.server.identity import FURL_NAME, INTRODUCER_FURL_NAME, load_furl, unusable
from pipegrid.server.serve import endpoint_text

# ``tahoe.cfg`` has ``[node] tub.port``, ``tub.location`` and ``web.port``. A directory without this file gets
# one, and also ``tahoe-introducer.tac``, from which ``tahoe run`` learns that the node is an introducer.
#
# An introducer and a storage server cannot use the same directory: with the same key they would be the same
# tub, and clients keep one connection to each tub.

TAC_NAME = "tahoe-introducer.tac"
_SECTIONS = ("node", "connections", "tor", "i2p")
_OTHER_NODES = (
    "tahoe-client.tac",
    CONFIG_NAME,
    SERVERS_NAME,
    INTRODUCERS_NAME,
    f"private/{FURL_NAME}",
)
_OLD_FURL = "introducer.furl"
_UNSUPPORTED_ENDPOINT = re.compile(r"(listen:)?(tor|i2p)\b")
_ANY_PORT = re.compile(r"tcp:(port=)?0(?=:|\Z)")
_NO_PAGE = ("", "0", "none")

# Privacy settings that an introducer cannot follow, each with the values that are permitted and the reason.
_PERMITTED = (
    ("node", "reveal-IP-address", ("", *TRUE), "an introducer's location reveals the IP address"),
    ("connections", "tcp", ("", "tcp"), "an introducer is reached over TCP"),
    ("tor", "onion", ("", *FALSE), "an introducer starts no onion service"),
)


@attrs.frozen
class IntroducerDirectory:
    """
    The introducer's settings in a directory.

    Attributes:
        settings: fields of ``IntroducerSettings`` by name; only those that the directory sets.
        is_new: whether the directory has no ``tahoe.cfg`` yet.
        warnings: a sentence for each setting that is not followed.
    """

    settings: Mapping[str, Any] = attrs.field(factory=dict)
    is_new: bool = False
    warnings: tuple[str, ...] = ()


def usual_directory() -> Path:
    """Return the default directory of the user's introducer; raises the errors of ``default_directory``."""
    own = default_directory()
    return own.with_name(f"{own.name}-introducer")


def load(directory: Path) -> IntroducerDirectory:
    """
    Return the introducer's settings in a directory.

    Raises:
        UsageError: the directory is another node's, a file cannot be parsed, or a setting cannot be followed.
    """
    for name in _OTHER_NODES:
        if (directory / name).exists():
            raise UsageError(
                f"{directory} is a client's or a storage server's directory, since it has {name}; give the "
                "introducer another"
            )
    if not (directory / TAHOE_CONFIG_NAME).is_file():
        return IntroducerDirectory(is_new=True)
    _, parser = read_config(directory)
    check(parser, "server")
    _check_privacy(parser)
    for section in parser.sections():
        if section not in _SECTIONS:
            raise UsageError(
                f"{parser.at_section(section)}: an introducer has no section [{section}]; remove it, or give "
                "another directory"
            )
    _move_old_furl(directory)
    status = _text(parser, "web.port")
    found = {
        "port": _port(directory, parser),
        "location": configured_location(parser, "introducer")
        or detected_location(directory, INTRODUCER_FURL_NAME),
        "status": None if status.lower() in _NO_PAGE else status,
    }
    settings = {name: value for name, value in found.items() if value is not None}
    return IntroducerDirectory(settings, warnings=_warnings(directory, parser, status))


def keep(
    directory: Path, *, port: str, status: str | None, listening: Any, hints: tuple[str, ...]
) -> None:
    """
    Write the settings of a new directory, so that the introducer has the same address at its next start.

    Args:
        port, status: the endpoints of the introducer and of its status page, as the user gave them;
            ``status`` is None without a page.
        listening: the address on which the introducer listens.
        hints: where clients find the introducer.

    Raises:
        UsageError: the directory cannot be written to.
    """
    number = getattr(listening, "port", None)
    port = endpoint_text(port)
    status = "" if status is None else endpoint_text(status, "127.0.0.1")
    if number:
        port = _ANY_PORT.sub(f"tcp:{number}", port)
    text = (
        "# An introducer of PipeGrid, or of Tahoe-LAFS.\n[node]\n"
        f"web.port = {status}\ntub.port = {port}\ntub.location = {','.join(hints)}\n"
    )
    try:
        create_file(directory / TAC_NAME, b"# an introducer\n", mode=0o644)
        create_file(directory / TAHOE_CONFIG_NAME, text.encode("utf-8"), mode=0o644)
    except OSError as error:
        raise unusable(error, directory) from error


def _check_privacy(parser: SettingsFile) -> None:
    """
    Check that each privacy setting that an introducer cannot follow has a permitted value.

    Raises:
        RefusedSetting: one of these settings has a value that is not permitted.
    """
    for section, option, permitted, why in _PERMITTED:
        text = parser.get(section, option, fallback="").strip()
        if text.lower() not in permitted:
            raise RefusedSetting(
                f"{parser.at(section, option)} is {text[:60]!r}, and {why}; remove the setting if that is "
                "right; nothing was sent"
            )


def _port(directory: Path, parser: SettingsFile) -> str | None:
    text = configured_port(parser, "introducer")
    if not text:
        return detected_port(directory)
    if is_unsupported(text):
        raise _wrong(
            parser, "tub.port", f"is {text!r}: no onion or I2P service is started; use a TCP port"
        )
    return text


def configured_port(parser: SettingsFile, node: str) -> str:
    """
    Return ``tub.port``; empty if Tahoe-LAFS has chosen a port (see ``detected_port``).

    Args:
        node: the kind of node in the directory, for errors.

    Raises:
        UsageError: the port is disabled.
    """
    text = _text(parser, "tub.port")
    if text == "disabled":
        raise _wrong(
            parser,
            "tub.port",
            f"is 'disabled', so no client could reach the {node}; set it to an address",
        )
    return text


def detected_port(directory: Path) -> str | None:
    """
    Return the port that Tahoe-LAFS has chosen and written to ``client.port``; None if the file is missing or
    empty.
    """
    path = directory / "client.port"
    data = read_bounded(path)
    return None if data is None else decode_text(data, str(path)).strip() or None


def is_unsupported(port: str) -> bool:
    """Return whether a ``tub.port`` has a Tor or I2P endpoint, on which this program does not listen."""
    return any(_UNSUPPORTED_ENDPOINT.match(each.strip()) for each in port.split(","))


def configured_location(parser: SettingsFile, node: str) -> str | None:
    """
    Return ``tub.location``; None if Tahoe-LAFS has detected the addresses (see ``detected_location``).

    Args:
        node: the kind of node in the directory, for errors.

    Raises:
        UsageError: the location is disabled.
    """
    hints = [each.strip() for each in _text(parser, "tub.location").split(",")]
    hints = [each for each in hints if each]
    if "disabled" in hints:
        raise _wrong(
            parser, "tub.location", f"is 'disabled': no client could reach the {node}; set it"
        )
    return ",".join(hints) if hints and "AUTO" not in hints else None


def detected_location(directory: Path, furl_name: str) -> str | None:
    """
    Return the addresses that Tahoe-LAFS has detected, from the node's fURL; None without a fURL or addresses.
    """
    known = load_furl(directory, furl_name)
    return None if known is None or not known.hints else ",".join(known.hints)


def _move_old_furl(directory: Path) -> None:
    """
    Move the fURL to the place where Tahoe-LAFS has kept it since version 1.10; Tahoe-LAFS moves it in the
    same way.
    """
    old, new = directory / _OLD_FURL, directory / "private" / INTRODUCER_FURL_NAME
    if not old.exists():
        return
    if new.exists():
        raise UsageError(f"both {old} and {new} exist; remove the one that clients do not know")
    try:
        new.parent.mkdir(mode=0o700, exist_ok=True)
        old.rename(new)
    except OSError as error:
        raise unusable(error, directory) from error


def _warnings(directory: Path, parser: SettingsFile, status: str) -> tuple[str, ...]:
    static = _text(parser, "web.static")
    if static and status and (directory / static).is_dir():
        return (
            f"{parser.at('node', 'web.static')} is not followed: the status port has no other files",
        )
    return ()


def _text(parser: SettingsFile, option: str) -> str:
    return parser.get("node", option, fallback="").strip()


def _wrong(parser: SettingsFile, option: str, what: str) -> UsageError:
    return UsageError(f"{parser.at('node', option)} {what}")

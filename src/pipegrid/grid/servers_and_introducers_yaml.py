"""The user's own lists of servers and introducers: ``servers.yaml`` and ``introducers.yaml``."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pipegrid.core import base32
from pipegrid.core.text import decode_text
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.grid.client_paths import INTRODUCERS_NAME, SERVERS_NAME
from pipegrid.grid.strict_config import (
    RefusedSetting,
    check_top_level,
    near_misses,
    parse_yaml,
    repeated_keys,
)
from pipegrid.grid.tahoe_settings_check import CONNECTIONS, check_entry
from pipegrid.wire import server_address
from pipegrid.wire.announcements import FURL, NURLS, KnownServer, describe, printable
from pipegrid.wire.server_address import Furl, Nurl

# A client's own list of servers: ``private/servers.yaml``, in Tahoe-LAFS's format.
#
#     storage:
#       v0-...:                                  # the server's id; any text
#         ann:
#           nickname: some name                  # optional
#           anonymous-storage-NURLs: [ "pb://...#v=1" ]     # HTTPS; without it, Foolscap
#           anonymous-storage-FURL: pb://...     # of Tahoe's servers: leases depend on it
#           permutation-seed-base32: ...         # optional
#
# An entry that cannot be used is skipped with a warning, and the other entries are used. A file that is not
# YAML is an error.
#
# Source: how Tahoe-LAFS 1.20 behaves.


_MAX_FILE_BYTES = 16 << 20
_ENTRY = re.compile(rb"""\bann["']?\s*:""")


class StaticServers(NamedTuple):
    """
    The content of a ``servers.yaml``.

    Attributes:
        servers: the servers, in the order of the file.
        warnings: a sentence for each entry that was skipped.
        ways: the ``WAY`` of each entry with ``connections: {tcp: WAY}``, by server id; includes skipped
            entries, since their servers may be announced.
    """

    servers: tuple[KnownServer, ...] = ()
    warnings: tuple[str, ...] = ()
    ways: Mapping[str, str] = MappingProxyType({})


def load_static_servers(directory: Path) -> StaticServers:
    """
    Return the servers in a client's ``servers.yaml``; none if the client has no such file.

    Raises:
        UsageError: the file cannot be read, or is not a ``servers.yaml``.
    """
    path = directory / SERVERS_NAME
    data = read_bounded(path)
    if data is None:
        return StaticServers()
    try:
        return parse_static_servers(data, str(path))
    except RefusedSetting:
        raise
    except UsageError as error:
        if CONNECTIONS.encode() not in data:
            raise
        # Without this error, the servers of the file could be found through introducers and be reached in a
        # way that the file forbids.
        raise RefusedSetting(
            f"{error}; it may say how servers must be reached, so nothing was sent"
        ) from error


def parse_static_servers(data: bytes, name: str) -> StaticServers:
    """
    Return the servers in the bytes of a ``servers.yaml``.

    Args:
        name: the file's name, for errors.
    """
    document = parse_yaml(data, name)
    check_top_level(document, "storage", data, name)
    storage = {} if document is None else member_of(document, "storage", {})
    if not isinstance(storage, dict):
        raise UsageError(f"{name} has no map of servers under 'storage'; correct it by hand")
    remarks = [
        remark
        for server_id, entry in storage.items()  # including skipped servers, which may be announced
        for remark in check_entry(server_id, entry, name)
    ]
    seen: dict[Nurl | Furl, str] = {}
    found = [
        _server_or_warning(server_id, entry, name, seen) for server_id, entry in storage.items()
    ]
    misspelt = [
        f"{name}: server {str(server_id)[:60]!r}: {hint}"
        for server_id, entry in storage.items()
        for hint in near_misses(_announcement(entry))
    ]
    # Searching for repeated keys takes as long as parsing, so search only if the file has more entries than
    # were parsed.
    repeated = [
        f"{name}:{line}: server {server_id[:60]!r} is listed twice, and only this one is used; give them "
        "different names"
        for server_id, line in (
            repeated_keys(data, "storage") if len(_ENTRY.findall(data)) > len(storage) else ()
        )
    ]
    return StaticServers(
        tuple(each for each in found if isinstance(each, KnownServer)),
        (*(each for each in found if isinstance(each, str)), *remarks, *misspelt, *repeated),
        _ways_in(storage),
    )


def _ways_in(storage: Mapping[Any, Any]) -> dict[str, str]:
    """Return the checked ``connections: {tcp: WAY}`` of each entry that has one."""
    found = {}
    for server_id, entry in storage.items():
        ways = member_of(entry, CONNECTIONS, None)
        if isinstance(ways, dict) and "tcp" in ways:
            found[str(server_id)] = str(ways["tcp"])
    return found


def is_address(text: str) -> bool:
    """Return whether a text looks like a NURL or a fURL."""
    return text.startswith(("pb://", "pb+tor://"))


def addresses_of(text: str, name: str) -> list[tuple[str, str]] | None:
    """
    Return the addresses in a file with one address per line, each with its place in the file; None if the
    file has another format.

    The output of ``serve`` has this format. Blank lines and lines that begin with # are ignored.
    """
    found = [
        (f"{name}:{number}", line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return found if found and is_address(found[0][1]) else None


def servers_of(addresses: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """
    Return the content of a ``servers.yaml`` for servers of which only the addresses are known.

    Addresses with the same secret belong to one server: its NURLs, which have the same key, and its fURL.

    Args:
        addresses: the addresses, each with its place in the file for errors.

    Raises:
        UsageError: one of the texts is not an address.
    """
    nurls: dict[tuple[bytes, str], list[Nurl]] = {}
    furls: dict[Furl, None] = {}
    for where, text in addresses:
        found = _address(where, text)
        if isinstance(found, Furl):
            furls[found] = None
        else:
            nurls.setdefault((found.spki_hash, found.swissnum), []).append(found)
    storage: dict[str, Any] = {}
    for (spki_hash, swissnum), known in nurls.items():
        spki = base64.urlsafe_b64encode(spki_hash).rstrip(b"=").decode("ascii")
        fields: dict[str, Any] = {"nickname": f"{known[0].host}:{known[0].port}"}
        fields[NURLS] = list(dict.fromkeys(map(str, known)))
        its = [each for each in furls if each.swissnum == swissnum]
        if len(its) == 1 and sum(secret == swissnum for _, secret in nurls) == 1:
            fields[FURL] = str(its[0])
            del furls[its[0]]
        storage[f"spki-{spki}"] = {"ann": fields}
    for each in furls:
        fields = {"nickname": each.address, FURL: str(each)}
        storage[f"tub-{base32.encode(each.tub_id)}"] = {"ann": fields}
    return {"storage": storage}


def with_servers(data: bytes, entries: Mapping[str, Any], name: str) -> str:
    """
    Return the text of a ``servers.yaml`` with more entries at its end. The existing text does not change,
    unless it is JSON or lists no server; then the result is JSON.

    Args:
        data: the file's bytes; empty for a new file.
        entries: the new entries by server id; entries whose id is listed already are not added.
        name: the file's name, for errors.

    Raises:
        UsageError: the file cannot be parsed, or has a form to which nothing can be added.
    """
    before = parse_yaml(data, name) if data.strip() else None
    check_top_level(before, "storage", data, name)
    listed = member_of(before, "storage", None) if before is not None else {}
    if not isinstance(listed, dict):
        listed = {} if listed is None and isinstance(before, dict) else None
    if listed is None:
        raise UsageError(f"{name} has no map of servers under 'storage'; correct it by hand")
    wanted = {"storage": {**entries, **listed}}
    more = {key: entry for key, entry in entries.items() if key not in listed}
    if not listed or _is_json(data):
        return json.dumps({"storage": {**listed, **more}}, indent=2) + "\n"
    text = decode_text(data, name).rstrip() + "\n"
    lines = [line for line in text.splitlines() if line[:1] in (" ", "\t") and line.strip()]
    first = next((line for line in lines if not line.lstrip().startswith("#")), "")
    indent = first[: len(first) - len(first.lstrip())]
    text += "".join(
        f"{indent}{json.dumps(key)}: {json.dumps(entry)}\n" for key, entry in more.items()
    )
    try:
        found = parse_yaml(text.encode("utf-8"), name)
    except UsageError:
        found = None
    if found != wanted:
        raise UsageError(f"{name} has a form that nothing can be added to; add the servers by hand")
    return text


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _address(where: str, text: str) -> Nurl | Furl:
    try:
        return (
            server_address.parse_furl(text)
            if server_address.is_furl(text)
            else server_address.parse_nurl(text)
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _announcement(entry: Any) -> dict[Any, Any]:
    fields = member_of(entry, "ann", None)
    return fields if isinstance(fields, dict) else {}


# Functions below import HTTP, TLS and Foolscap only when needed: the imports are slow, and an embedded grid
# needs none of them.


def read_bounded(path: Path) -> bytes | None:
    """
    Return a configuration file's bytes, or None if it does not exist.

    Raises:
        UsageError: the file cannot be read, or is larger than the bound.
    """
    try:
        data = read_file(path, _MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; is it the right file?")
    return data


def _server_or_warning(
    server_id: Any, entry: Any, name: str, seen: dict[Nurl | Furl, str]
) -> KnownServer | str:
    """
    Return the server of an entry, or a warning why the entry is skipped.

    Args:
        seen: the addresses of earlier entries, with the server ids; the addresses of this entry are added.
    """
    try:
        fields = member_of(entry, "ann", None)
        if not isinstance(fields, dict):
            raise ValueError("it has no map under 'ann'")
        server = describe(server_id, fields)
        for address in server.addresses:
            if address in seen:
                raise ValueError(same_address(seen[address]))
        seen.update(dict.fromkeys(server.addresses, server.identity.server_id))
        return server
    except ValueError as error:
        return f"{name}: server {str(server_id)[:60]!r} is skipped: {error}"


def same_address(server_id: str) -> str:
    """
    Return the warning for a second entry of one server. The entry is skipped, else two shares of a file could
    be on one disk.
    """
    return f"it has the address of server {server_id[:60]!r}, and is used once"


def member_of(value: Any, key: str, default: Any) -> Any:
    """Return a map's value for a key, or the default; None if the value is not a map."""
    return value.get(key, default) if isinstance(value, dict) else None


# A client's list of introducers: ``private/introducers.yaml``, in Tahoe-LAFS's format.
#
#     introducers:
#       my grid:                  # any name
#         furl: pb://...
#
# An old ``tahoe.cfg`` names its only introducer in ``[client] introducer.furl`` instead. An entry that cannot
# be used is skipped with a warning.
#
# Source: how Tahoe-LAFS 1.20 behaves.

MAX_INTRODUCERS = 32


class IntroducerAddress(NamedTuple):
    """An introducer's fURL, and its name in the user's file."""

    name: str
    furl: Furl


class Introducers(NamedTuple):
    """
    The content of an ``introducers.yaml``.

    Attributes:
        addresses: the introducers, in the order of the file.
        warnings: a sentence for each entry that was skipped.
    """

    addresses: tuple[IntroducerAddress, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_text(self) -> str:
        """
        Return these introducers as the text of an ``introducers.yaml``; the text is JSON, which is also YAML.
        """
        entries = {each.name: {"furl": str(each.furl)} for each in self.addresses}
        return json.dumps({"introducers": entries}, indent=2) + "\n"


def load_introducers(directory: Path, old_furl: str | None = None) -> Introducers:
    """
    Return the introducers of a client's directory; none if it has no ``introducers.yaml``.

    Args:
        old_furl: the fURL of an old configuration, which is added under the name ``default``, unless the file
            has that name.

    Raises:
        UsageError: the file cannot be read, or is not an ``introducers.yaml``.
    """
    path = directory / INTRODUCERS_NAME
    data = read_bounded(path)
    found = Introducers() if data is None else parse_introducers(data, str(path))
    if old_furl is None or any(each.name == "default" for each in found.addresses):
        return found
    old = _entries({"default": {"furl": old_furl}}, "[client] introducer.furl")
    return Introducers(found.addresses + old.addresses, found.warnings + old.warnings)


def parse_introducers(data: bytes, name: str) -> Introducers:
    """
    Return the introducers in the bytes of an ``introducers.yaml``; ``name`` is the file's name, for errors.
    """
    document = parse_yaml(data, name)
    check_top_level(document, "introducers", data, name)
    introducers = {} if document is None else member_of(document, "introducers", {})
    if introducers is None and isinstance(document, dict):
        introducers = {}
    if not isinstance(introducers, dict):
        raise UsageError(f"{name} has no map under 'introducers'; correct it by hand")
    return _entries(introducers, name)


def _entries(introducers: Mapping[Any, Any], name: str) -> Introducers:
    addresses, warnings = [], []
    for number, (petname, entry) in enumerate(introducers.items()):
        shown = printable(str(petname))
        try:
            if number >= MAX_INTRODUCERS:
                raise UsageError(f"more than {MAX_INTRODUCERS} are not used")
            text = member_of(entry, "furl", None)
            if not isinstance(text, str):
                raise UsageError("it has no text under 'furl'")
            address = server_address.parse_furl(text.strip())
            if not address.has_address:
                raise UsageError(
                    "its fURL has no address for TCP or Tor, and PipeGrid uses no others"
                )
            addresses.append(IntroducerAddress(shown, address))
        except UsageError as error:
            warnings.append(f"{name}: introducer {shown!r} is skipped: {error}")
        others = [key for key in entry if key != "furl"] if isinstance(entry, dict) else []
        warnings += [
            f"{name}: introducer {shown!r}: {printable(str(key))!r} is not read"
            for key in others[:8]
        ]
    return Introducers(tuple(addresses), tuple(warnings))

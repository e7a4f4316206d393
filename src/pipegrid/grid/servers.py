"""
Servers that a client's directory names: ``private/servers.yaml``, in Tahoe-LAFS's own format.

    storage:
      v0-...:                                  # the server's id; any text
        ann:
          nickname: some name                  # optional
          anonymous-storage-NURLs: [ "pb://...#v=1" ]     # HTTPS; without, Foolscap is spoken
          anonymous-storage-FURL: pb://...     # of Tahoe's servers: leases depend on it
          permutation-seed-base32: ...         # optional

An entry that cannot be used is skipped, and a warning says which and why: one bad line must not take
all the others away. The file is the user's; that it is no YAML at all is an error.

Source: the format reference, storage protocols, sections 4.3, 5.1 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.hashes import tagged_hash
from pipegrid.core.ring import permutation_seed
from pipegrid.errors import UsageError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import AutoWindow
from pipegrid.transfer.peers import Peer
from pipegrid.transport.interface import StorageServer
from pipegrid.wire import furl, nurl
from pipegrid.wire.furl import Furl
from pipegrid.wire.messages import ServerIdentity
from pipegrid.wire.nurl import Nurl

SERVERS_NAME = "private/servers.yaml"

WINDOW_MEMORY_BYTES = 32 << 20
"""
What is sent and unacknowledged, towards all servers that a file has shares on. With as much for coding
(see ``grid.UPLOAD_MEMORY_BYTES``) a client stays under 64 MiB. Ten servers get 3.2 MiB each: the window
and the message that may go beyond it. At 100 ms that carries 320 MB/s, at 300 ms 100.
"""
_MESSAGE_BYTES = 1 << 20  # what lanes gather before they write
_LEAST_WINDOW_BYTES = 256 << 10
_MAX_FILE_BYTES = 16 << 20
_MAX_ID_CHARACTERS = 256


@attrs.frozen
class StaticServer:
    """
    A server of which the address is known.

    Attributes:
        nurl: where it speaks HTTPS; None: it does not.
        furl: where it speaks Foolscap; used where there is no NURL.
    """

    identity: ServerIdentity
    nurl: Nurl | None
    furl: Furl | None = None


@attrs.frozen
class StaticServers:
    """
    What ``servers.yaml`` says.

    Attributes:
        servers: in the order of the file.
        warnings: a sentence for each entry that was skipped.
    """

    servers: tuple[StaticServer, ...] = ()
    warnings: tuple[str, ...] = ()


def load_static_servers(directory: Path) -> StaticServers:
    """
    Return the servers that a client's directory names; none if it has no such file.

    Raises:
        UsageError: the file cannot be read, or is not what it should be as a whole.
    """
    path = directory / SERVERS_NAME
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return StaticServers()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; is it the right file?")
    return parse_static_servers(data, str(path))


def parse_static_servers(data: bytes, name: str) -> StaticServers:
    """
    Return what the bytes of a ``servers.yaml`` say.

    Args:
        name: of the file, for errors.
    """
    import yaml

    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        first_line = (str(error).splitlines() or ["no YAML"])[0]
        raise UsageError(f"cannot understand {name}: {first_line}; mend it by hand") from error
    storage = {} if document is None else _member(document, "storage", {})
    if not isinstance(storage, dict):
        raise UsageError(f"{name} has no map of servers under 'storage'; mend it by hand")
    found = [_server_or_warning(server_id, entry, name) for server_id, entry in storage.items()]
    return StaticServers(
        tuple(each for each in found if isinstance(each, StaticServer)),
        tuple(each for each in found if isinstance(each, str)),
    )


def open_static(reactor: IReactorTime, servers: Sequence[StaticServer], shares: int) -> list[Peer]:
    """
    Return a peer for each server; nothing is connected yet.

    Args:
        shares: how many servers a file is usually spread over; they share the memory for windows.
    """
    if not servers:
        return []
    maximum = window_bytes(min(len(servers), shares))
    peers = []
    for each in servers:
        pipeline = Pipeline(AutoWindow(maximum_bytes=maximum), reactor)
        if each.nurl is not None:
            server = _open_gbs(reactor, each.identity, each.nurl)
            peers.append(Peer(server, pipeline, "https", f"{each.nurl.host}:{each.nurl.port}"))
        else:
            assert each.furl is not None, "a server has an address"
            server = _open_foolscap(reactor, each.identity, each.furl)
            peers.append(Peer(server, pipeline, "foolscap", each.furl.address))
    return peers


# HTTP, TLS and Foolscap take long to import, and an embedded grid needs none of them.


def _open_gbs(reactor: IReactorTime, identity: ServerIdentity, address: Nurl) -> StorageServer:
    from pipegrid.transport.gbs import GbsServer, endpoints_for

    return GbsServer(identity, address, endpoints_for(reactor, address, identity.nickname), reactor)


def _open_foolscap(reactor: IReactorTime, identity: ServerIdentity, address: Furl) -> StorageServer:
    from pipegrid.transport.foolscap import FoolscapServer
    from pipegrid.transport.foolscaptub import TubConnector

    return FoolscapServer(identity, TubConnector(address), reactor)


def window_bytes(servers: int) -> int:
    """Return how much may be unacknowledged by each of so many servers."""
    return max(_LEAST_WINDOW_BYTES, WINDOW_MEMORY_BYTES // servers - _MESSAGE_BYTES)


def _server_or_warning(server_id: Any, entry: Any, name: str) -> StaticServer | str:
    try:
        return _server(server_id, entry)
    except (UsageError, ValueError) as error:
        return f"{name}: server {str(server_id)[:60]!r} is skipped: {error}"


def _server(server_id: Any, entry: Any) -> StaticServer:
    if not isinstance(server_id, str) or not 1 <= len(server_id) <= _MAX_ID_CHARACTERS:
        raise ValueError(f"its id is no text of 1 to {_MAX_ID_CHARACTERS} characters")
    announcement = _member(entry, "ann", None)
    if not isinstance(announcement, dict):
        raise ValueError("it has no map under 'ann'")
    foolscap = _furl(announcement)
    address = _nurl(announcement)
    if address is None and foolscap is None:
        raise ValueError("it has neither anonymous-storage-NURLs nor an anonymous-storage-FURL")
    return StaticServer(
        ServerIdentity(
            server_id,
            _text(announcement, "nickname") or server_id,
            permutation_seed(server_id, _text(announcement, "permutation-seed-base32")),
            _lease_seed(foolscap, address),
        ),
        address,
        foolscap,
    )


def _nurl(announcement: dict[Any, Any]) -> Nurl | None:
    """Return the first NURL that can be used; they all lead to the same server."""
    texts = announcement.get("anonymous-storage-NURLs")
    if not texts:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("its anonymous-storage-NURLs are no list of texts")
    found = [nurl.parse(text) for text in texts]
    direct = [each for each in found if not each.tor]
    if not direct:
        raise ValueError("it is reached through Tor only, which is not supported yet")
    return direct[0]


def _furl(announcement: dict[Any, Any]) -> Furl | None:
    text = _text(announcement, "anonymous-storage-FURL")
    if text is None:
        return None
    try:
        found = furl.parse(text)
    except UsageError as error:
        raise ValueError(f"its anonymous-storage-FURL is no fURL: {error}") from error
    if not announcement.get("anonymous-storage-NURLs") and not any(
        hint.startswith("tcp:") for hint in found.hints
    ):
        raise ValueError(
            "its anonymous-storage-FURL leads to no TCP port, which is all that works yet"
        )
    return found


def _lease_seed(foolscap: Furl | None, address: Nurl | None) -> bytes:
    """
    Return the 20 bytes that make this server's secrets differ from others'.

    They are the tub id of its fURL, over HTTPS as well. For a server that has none, any that stay the
    same will do, for leases: they follow from its key.
    """
    if foolscap is not None:
        return foolscap.tub_id
    assert address is not None
    return tagged_hash(b"pipegrid_gbs_lease_seed_v1", address.spki_hash)[:20]


def _text(announcement: dict[Any, Any], key: str) -> str | None:
    value = announcement.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"its {key} is no text")
    return value


def _member(value: Any, key: str, default: Any) -> Any:
    return value.get(key, default) if isinstance(value, dict) else None

"""
The named clients of a storage server: each has an address and a quota of its own.

They are stored in ``private/clients.json`` of the node's directory. ``pipegrid serve --client`` writes this
file, even while the server runs; the server reads the file again when it has changed.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import UsageError
from pipegrid.server import identity
from pipegrid.storage.client_space import FIRST_NUMBER, MAX_CLIENTS, ClientQuota
from pipegrid.wire import server_address
from pipegrid.wire.server_address import Furl

CLIENTS_NAME = "private/clients.json"
LOOK_S = 5.0
"""How often a server checks whether the file has changed, in seconds."""

_MAX_BYTES = 64 << 10
_MAX_QUOTA_BYTES = 1 << 62
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_LAST_NUMBER = (1 << 32) - 1


@attrs.frozen
class NamedClient:
    """
    One named client.

    Attributes:
        number: see ``ClientQuota``; random, so that a new client does not get the number of an earlier one if
            the file was lost.
        swissnum: the secret in the client's addresses.
        quota_bytes: the most bytes of the client's shares; 0: no quota.
    """

    name: str
    number: int
    swissnum: str = attrs.field(repr=False)
    quota_bytes: int

    @property
    def quota(self) -> ClientQuota:
        """The client's data that the store needs."""
        return ClientQuota(self.number, self.name, self.quota_bytes)


def read_clients(directory: Path) -> tuple[NamedClient, ...]:
    """
    Return the clients of the server in a node's directory; none if there is no file of clients.

    Raises:
        UsageError: the file cannot be read, or is damaged.
    """
    path = directory / CLIENTS_NAME
    try:
        data = read_file(path, _MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise identity.unusable(error, path) from error
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError("it is too long")
        return _parse(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot understand {path} ({error}); restore it") from error


def _parse(value: object) -> tuple[NamedClient, ...]:
    if not isinstance(value, dict) or len(value) > MAX_CLIENTS:
        raise ValueError(f"it is not an object of at most {MAX_CLIENTS} clients")
    found = [_parse_one(name, each) for name, each in value.items()]
    for kind in ("number", "swissnum"):
        if len({getattr(each, kind) for each in found}) < len(found):
            raise ValueError(f"two clients have the same {kind}")
    return tuple(found)


def _parse_one(name: str, value: object) -> NamedClient:
    if not isinstance(value, dict) or not _NAME.match(name):
        raise ValueError("a client has no valid name, or no fields")
    number, swissnum, quota = (value.get(key) for key in ("number", "swissnum", "quota"))
    if type(number) is not int or not FIRST_NUMBER <= number <= _LAST_NUMBER:
        raise ValueError(f"the number of {name} is impossible")
    if not isinstance(swissnum, str) or not server_address.is_swissnum(swissnum):
        raise ValueError(f"the secret of {name} is impossible")
    if type(quota) is not int or not 0 <= quota <= _MAX_QUOTA_BYTES:
        raise ValueError(f"the quota of {name} is impossible")
    return NamedClient(name, number, swissnum, quota)


def keep_client(directory: Path, name: str, quota_bytes: int | None) -> NamedClient:
    """
    Add a client, or change its quota; returns the client.

    Args:
        quota_bytes: the new quota; None: unchanged, or no quota for a new client.

    Raises:
        UsageError: the name is not valid, there are too many clients, or the file cannot be used.
    """
    if not _NAME.match(name):
        raise UsageError(
            f"{name!r} cannot be the name of a client; use up to 63 letters, digits, '.', '-' and '_'"
        )
    with _changing(directory) as clients:
        client = clients.get(name)
        if client is None:
            if len(clients) >= MAX_CLIENTS:
                raise UsageError(
                    f"a server has at most {MAX_CLIENTS} named clients; remove one with --remove-client"
                )
            numbers = {each.number for each in clients.values()}
            number = random.SystemRandom().randint(FIRST_NUMBER, _LAST_NUMBER)
            while number in numbers:
                number = random.SystemRandom().randint(FIRST_NUMBER, _LAST_NUMBER)
            client = NamedClient(name, number, identity.new_swissnum(), 0)
        if quota_bytes is not None:
            client = attrs.evolve(client, quota_bytes=min(quota_bytes, _MAX_QUOTA_BYTES))
        clients[name] = client
    return client


def remove_client(directory: Path, name: str) -> None:
    """
    Remove a client, which cannot connect any more; its shares stay until their leases expire.

    Raises:
        UsageError: there is no client with this name, or the file cannot be used.
    """
    with _changing(directory) as clients:
        if clients.pop(name, None) is None:
            raise UsageError(
                f"the server in {directory} has no client {name!r}; 'pipegrid serve --usage' lists them"
            )


@contextmanager
def _changing(directory: Path) -> Iterator[dict[str, NamedClient]]:
    """
    Yield the clients by name, and write them if the caller has changed them; other processes that want to
    change them wait meanwhile.
    """
    path = directory / CLIENTS_NAME
    try:
        make_directory(path.parent, 0o700)
        lock = disk.open_locked(f"{path}.lock", os.O_RDWR | os.O_CREAT, mode=0o600, wait=True)
    except OSError as error:
        raise identity.unusable(error, path) from error
    assert lock is not None, "waiting for a lock gives it"
    try:
        before = {each.name: each for each in read_clients(directory)}
        clients = dict(before)
        yield clients
        if clients != before:
            kept = {
                each.name: {
                    "number": each.number,
                    "swissnum": each.swissnum,
                    "quota": each.quota_bytes,
                }
                for each in clients.values()
            }
            try:
                replace_file(path, json.dumps(kept, indent=1).encode("ascii") + b"\n")
                _give_to_server(path)
            except OSError as error:
                raise identity.unusable(error, path) from error
    finally:
        os.close(lock)


def _give_to_server(path: Path) -> None:
    """If root has changed the clients of another user's server, let this user read and change the files."""
    user = os.stat(path.parent)
    if os.geteuid() == 0 and user.st_uid != 0:
        for each in (path, f"{path}.lock"):
            os.chown(each, user.st_uid, user.st_gid, follow_symlinks=False)


def check_served(directory: Path) -> Furl:
    """
    Return the fURL of the server in a node's directory, with the addresses of its last start.

    Raises:
        UsageError: no server was started in the directory yet.
    """
    furl = identity.load_furl(directory)
    if furl is None:
        raise UsageError(
            f"there is no server in {directory} yet; start it with 'pipegrid -d {directory} serve', and give "
            "--client then"
        )
    return furl


def addresses(directory: Path, client: NamedClient) -> tuple[list[str], str]:
    """
    Return the NURLs and the fURL of a client, with the addresses of the server's last start.

    Raises:
        UsageError: no server was started in the directory yet, or its files cannot be used.
    """
    hints = check_served(directory).hints
    who = attrs.evolve(identity.load_or_create(directory), swissnum=client.swissnum)
    return who.nurls(hints), str(who.furl(hints))


class ClientWatch:
    """Notices changes of the file with a server's clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen = self._state()

    def look(self) -> Sequence[NamedClient] | None:
        """
        Return the clients if their file has changed since the last call, else None.

        Raises:
            UsageError: the file has changed, and cannot be used.
        """
        state = self._state()
        if state == self._seen:
            return None
        self._seen = state
        return read_clients(self._directory)

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._directory / CLIENTS_NAME)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_uid

"""
A grid manager: its key, the storage servers that it knows, and the certificates that it has signed.

The files are those of Tahoe-LAFS's ``grid-manager``; each program can use the other's files:

    config.json         the manager's private key; names and public keys of storage servers
    NAME.cert.NUMBER    the certificates of a storage server, in the order in which they were signed

Source: Tahoe-LAFS 1.20, ``docs/managed-grid.rst`` and the behaviour of its ``grid-manager``.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import attrs

from pipegrid.core import base32
from pipegrid.core.clamped_dates import utc
from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import create_file, replace_file, sync_name
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import CannotLock, open_locked, read_file
from pipegrid.errors import SinkError, UsageError
from pipegrid.storage.lease_check_log import why_wrong
from pipegrid.wire.announcements import AnnouncementKey, make_signing_key, parse_signing_key
from pipegrid.wire.grid_manager_certificates import (
    ManagerKey,
    SignedCertificate,
    parse_certificate,
    public_key_bytes,
    signature_of,
    terms_of,
)

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 4 << 20
"""The largest ``config.json``; a storage server takes about 120 bytes."""
MAX_CERTIFICATE_BYTES = 4096
MAX_CERTIFICATES_OF_A_SERVER = 1000
MAX_NAME_BYTES = 200
"""The longest name of a storage server, since files are named after it."""

_VERSION = 0
_CERTIFICATE_VERSION = 1
_LOCK_TRIES = 100
_LOCK_WAIT_S = 0.05


class GridManager:
    """
    A grid manager's configuration. Its unknown fields are kept.

    Attributes:
        key: signs certificates.
        servers: the public keys of the storage servers (``pub-v0-...``) by name.
    """

    def __init__(self, key: AnnouncementKey, document: dict[str, Any] | None = None) -> None:
        self.key = key
        self._document = document or {
            "grid_manager_config_version": _VERSION,
            "private_key": str(key),
        }

    @property
    def servers(self) -> dict[str, str]:
        """The public keys of the storage servers by name."""
        return {name: each["public_key"] for name, each in self._entries.items()}

    @property
    def _entries(self) -> dict[str, Any]:
        found: dict[str, Any] = self._document.get("storage_servers", {})
        return found

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration as a JSON object, with the private key."""
        return self._document

    @property
    def text(self) -> str:
        """The configuration as the text of its file, without a line end; it contains the private key."""
        return json.dumps(self._document, indent=4)

    def add(self, name: str, public_key: str) -> None:
        """
        Add a storage server.

        Raises:
            UsageError: the name is not valid or is in use, or the public key is not valid.
        """
        check_name(name)
        if name in self._entries:
            raise UsageError(
                f"a storage server named '{name}' exists already; choose another name, or remove it first"
            )
        if public_key_bytes(public_key.strip()) is None:
            raise UsageError(
                "the public key is not pub-v0- and 52 characters of base32; copy it from node.pubkey in the "
                "storage server's directory"
            )
        self._document["storage_servers"] = {
            **self._entries,
            name: {"public_key": public_key.strip()},
        }

    def remove(self, name: str) -> None:
        """
        Remove a storage server; its certificates stay valid until they expire.

        Raises:
            UsageError: there is no storage server with this name.
        """
        self._known(name)
        entries = {each: entry for each, entry in self._entries.items() if each != name}
        self._document["storage_servers"] = entries
        if not entries:
            del self._document["storage_servers"]

    def sign(self, name: str, days: int, now_s: float) -> SignedCertificate:
        """
        Return a new certificate for a storage server.

        Args:
            days: how long the certificate is valid.
            now_s: seconds since 1970.

        Raises:
            UsageError: there is no storage server with this name, or the clock is wrong.
        """
        public_key = self._known(name)
        if why_wrong(now_s) is not None:
            raise UsageError(
                f"the clock of this machine shows {utc(now_s):%Y-%m-%d}, so the certificate would expire "
                "at a wrong time; set it"
            )
        expires = utc(now_s) + timedelta(days=days)
        return certificate_for(self.key, public_key, expires)

    def _known(self, name: str) -> str:
        if name not in self._entries:
            raise UsageError(
                f"there is no storage server named '{printable(name[:MAX_NAME_BYTES])}'; "
                "'pipegrid grid-manager list' lists them"
            )
        return self.servers[name]


def certificate_for(key: AnnouncementKey, public_key: str, expires: datetime) -> SignedCertificate:
    """
    Return a certificate, signed with a manager's key; the text is byte for byte as Tahoe-LAFS writes it.
    """
    terms = {
        "expires": expires.isoformat(),
        "public_key": public_key,
        "version": _CERTIFICATE_VERSION,
    }
    text = json.dumps(terms, separators=(",", ":"), sort_keys=True)
    return SignedCertificate(text, base32.encode(key.sign(text.encode("ascii"))))


def certificate_text(signed: SignedCertificate) -> str:
    """Return the text of a certificate's file, without a line end."""
    return json.dumps(signed._asdict(), indent=4)


def check_name(name: str) -> None:
    """
    Check that every program can name files after a storage server with this name.

    Raises:
        UsageError: the name is not suitable.
    """
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise UsageError(
            f"the name of a storage server has at most {MAX_NAME_BYTES} bytes; choose a shorter one"
        )
    if not _can_name_files(name) or not name.isprintable() or name != name.strip():
        raise UsageError(
            f"'{printable(name[:20])}' cannot be the name of a storage server, after which files are named; "
            "choose one without slashes, line ends and spaces around it"
        )


def _can_name_files(name: str) -> bool:
    """
    Return whether files can be named after a storage server; other programs accept servers with any name.
    """
    try:
        data = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return 0 < len(data) <= MAX_NAME_BYTES and not {"/", "\0"} & {*name}


def new_manager() -> GridManager:
    """Return a grid manager with a new key."""
    return GridManager(make_signing_key())


def parse_manager(data: bytes, name: str) -> GridManager:
    """
    Return the grid manager of a configuration.

    Args:
        data: the configuration, at most ``MAX_CONFIG_BYTES``.
        name: the file's name, for errors. Errors contain nothing of the file's content.

    Raises:
        UsageError: the configuration is not a grid manager's, or is damaged.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise UsageError(f"{name} has more than {MAX_CONFIG_BYTES} bytes; is it the right file?")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise UsageError(f"{name} is not JSON; restore it") from None
    version = document.get("grid_manager_config_version") if isinstance(document, dict) else None
    if version != _VERSION or isinstance(version, bool):
        raise UsageError(
            f"{name} is not a grid manager's configuration of version {_VERSION}; is it the right file?"
        )
    try:
        key = parse_signing_key(document["private_key"])
    except (KeyError, AttributeError, ValueError, TypeError):
        raise UsageError(f"the private_key in {name} is missing or damaged; restore it") from None
    servers = document.get("storage_servers", {})
    for each, entry in servers.items() if isinstance(servers, dict) else [("", None)]:
        public_key = entry.get("public_key") if isinstance(entry, dict) else None
        if not isinstance(public_key, str) or public_key_bytes(public_key) is None:
            raise UsageError(
                f"the public_key of storage server '{printable(each[:20])}' in {name} is missing or damaged; "
                "restore it"
            )
    return GridManager(key, document)


# The directory.


def load_manager(directory: Path) -> GridManager:
    """
    Return the grid manager of a directory.

    Raises:
        UsageError: the directory is not a grid manager's, or its configuration is damaged.
    """
    path = directory / CONFIG_NAME
    try:
        data = read_file(path, MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{directory} is not a grid manager's directory: it has no {CONFIG_NAME}; make one with "
            f"'pipegrid grid-manager --config {directory} create'"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return parse_manager(data, str(path))


def create_manager(directory: Path, manager: GridManager) -> None:
    """
    Make a grid manager's directory, which only its owner can read. The directory gets its name only when it
    is complete. Missing parents are made.

    Raises:
        UsageError: the directory exists, or cannot be made.
        SinkError: the disk is full.
    """
    directory = Path(os.path.abspath(directory))
    if os.path.lexists(directory):
        raise UsageError(f"{directory} exists already; choose another directory")
    hidden = directory.with_name(f".{directory.name}.{os.getpid()}.creating")
    try:
        make_directory(directory.parent)
        shutil.rmtree(hidden, ignore_errors=True)  # left by an interrupted attempt
        make_directory(hidden, 0o700)
        replace_file(hidden / CONFIG_NAME, f"{manager.text}\n".encode("ascii"))
        os.rename(hidden, directory)
        sync_name(directory)
    except BaseException as error:
        shutil.rmtree(hidden, ignore_errors=True)
        if isinstance(error, OSError):
            raise _unwritable(directory, error, "choose another directory") from error
        raise


@contextmanager
def changing(directory: Path) -> Iterator[GridManager]:
    """
    Return a context that provides the grid manager of a directory, and writes it to the directory at the end.
    No other command changes the grid manager meanwhile.

    Only the owner can read the written file.

    Raises:
        UsageError: as for ``load_manager``; another command is changing the grid manager; or the file cannot
            be written.
        SinkError: the disk is full, and nothing was changed.
    """
    with _locked(directory):
        manager = load_manager(directory)
        yield manager
        path = directory / CONFIG_NAME
        data = f"{manager.text}\n".encode("ascii")
        if len(data) > MAX_CONFIG_BYTES:
            raise UsageError(
                f"{path} would be too large; remove storage servers that are not needed"
            )
        try:
            replace_file(Path(os.path.realpath(path)), data)
        except OSError as error:
            raise _unwritable(path, error, "make it writable") from error


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = None
    try:
        for _ in range(_LOCK_TRIES):
            fd = open_locked(os.path.realpath(directory), os.O_RDONLY | os.O_DIRECTORY)
            if fd is not None:
                break
            time.sleep(_LOCK_WAIT_S)
        else:
            raise UsageError(f"another command is changing {directory}; try again when it is done")
    except CannotLock:  # continue without a lock
        pass
    except OSError:
        load_manager(directory)  # raises an error with a better message
        raise
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _unwritable(path: Path, error: OSError, advice: str) -> UsageError | SinkError:
    text = f"cannot write {path}: {error.strerror}; nothing was changed"
    if error.errno in FULL:
        return SinkError(f"{text}; free some space")
    return UsageError(f"{text}; {advice}")


# The files of certificates in the directory.


@attrs.frozen
class IssuedCertificate:
    """
    One of the certificates in a grid manager's directory.

    Attributes:
        number: the number in the file's name; a removed certificate's number is used again.
        expires: when the certificate expires; None if there is a problem.
        problem: a sentence about what is wrong with the file, or "".
    """

    number: int
    expires: datetime | None
    problem: str = ""


def issued_certificates(
    directory: Path, manager: GridManager, name: str
) -> list[IssuedCertificate]:
    """Return the certificates of a storage server; a damaged certificate is included, with its problem."""
    public_key = manager.servers[name]
    key = ManagerKey("", manager.key.public_bytes)
    found = []
    for number, path in _certificate_paths(directory, name):
        try:
            signed = parse_certificate(read_file(path, MAX_CERTIFICATE_BYTES))
        except FileNotFoundError:
            continue  # was removed by hand, or never existed
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            found.append(IssuedCertificate(number, None, f"it cannot be used: {reason}"))
            continue
        terms, signature = terms_of(signed), signature_of(signed)
        assert terms is not None
        assert signature is not None
        problem = ""
        if not key.has_signed(signed.certificate.encode("utf-8", "replace"), signature):
            problem = "this grid manager has not signed it"
        elif terms.public_key != public_key:
            problem = f"it is for another public key, {printable(terms.public_key[:60])}"
        found.append(IssuedCertificate(number, None if problem else terms.expires, problem))
    return found


def _certificate_paths(directory: Path, name: str) -> Iterator[tuple[int, Path]]:
    """
    Yield the possible numbers and paths of a storage server's certificates; nothing if no file can be named
    after the server.
    """
    if not _can_name_files(name):  # another program added the server
        return
    for number in range(MAX_CERTIFICATES_OF_A_SERVER):
        yield number, directory / f"{name}.cert.{number}"


def store_certificate(directory: Path, name: str, signed: SignedCertificate) -> Path:
    """
    Store a certificate under the first free number, and return its path; existing certificates are not
    replaced.

    Raises:
        UsageError: the certificate cannot be stored, or the server has too many.
        SinkError: the disk is full.
    """
    if not _can_name_files(name):
        check_name(name)
    data = certificate_text(signed).encode("ascii")
    try:
        for _, path in _certificate_paths(directory, name):
            if not os.path.lexists(path) and create_file(path, data, mode=0o644):
                return path
    except OSError as error:
        raise _unwritable(path, error, "make the directory writable") from error
    raise UsageError(
        f"'{name}' has {MAX_CERTIFICATES_OF_A_SERVER} certificates in {directory}; remove the oldest"
    )


def remove_certificates(directory: Path, name: str) -> None:
    """
    Remove the certificates of a storage server.

    Raises:
        UsageError: a certificate cannot be removed.
    """
    try:
        for _, path in _certificate_paths(directory, name):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot remove {path}: {error.strerror}; remove it by hand") from error

"""
The certificates of grid managers that a storage server announces: their files, and when they expire.

The files are those that the server's settings name, and ``certificates/*.cert`` in the server's directory,
where ``pipegrid grid-manager install`` puts them. They are read again regularly while the server runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
from twisted.logger import Logger

from pipegrid.core.text import printable
from pipegrid.disk.atomic_write import is_part_name, replace_file
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import read_file
from pipegrid.errors import SinkError, UsageError
from pipegrid.wire.grid_manager_certificates import (
    MAX_CERTIFICATES,
    MAX_FILE_BYTES,
    NEAR_EXPIRY_S,
    CertificateTerms,
    SignedCertificate,
    in_words,
    parse_certificate,
    public_key_bytes,
    terms_of,
)

DIRECTORY_NAME = "certificates"
SUFFIX = ".cert"
MAX_FILES = 64
LOOK_S = 600.0
"""How often a running server reads the files again."""

_MAX_NAME_CHARACTERS = 100

log = Logger()


def read_certificate(path: Path) -> SignedCertificate:
    """
    Return the certificate in a file.

    Raises:
        UsageError: the file cannot be read, or has no certificate.
    """
    try:
        return _parsed(read_file(path, MAX_FILE_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(
            f"cannot read the certificate {path}: {error.strerror}; restore it"
        ) from error


def _parsed(data: bytes, name: str) -> SignedCertificate:
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return parse_certificate(data)
    except ValueError as error:
        raise UsageError(
            f"{name} is not a certificate of a grid manager: {error}; ask for it again"
        ) from None


# Files of certificates in the server's directory.


def path_of(directory: Path, manager: str) -> Path:
    """Return the path at which the certificate of a grid manager is installed in a server's directory."""
    return directory / DIRECTORY_NAME / f"{manager}{SUFFIX}"


def installed_terms(directory: Path, manager: str) -> CertificateTerms | None:
    """Return the terms of a manager's installed certificate; None if there is none, or it is damaged."""
    try:
        return terms_of(read_certificate(path_of(directory, manager)))
    except (UsageError, ValueError):
        return None


def installed_files(directory: Path) -> list[Path]:
    """
    Return the files of certificates in a server's directory, in the order of their names.

    Raises:
        UsageError: there are more than ``MAX_FILES``, or the directory cannot be listed.
    """
    place = directory / DIRECTORY_NAME
    found: list[Path] = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not is_part_name(entry.name):
                    found.append(place / entry.name)
                if len(found) > MAX_FILES:
                    raise UsageError(
                        f"{place} has more than {MAX_FILES} certificates; remove those that have expired"
                    )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(f"cannot list {place}: {error.strerror}; make it readable") from error
    return sorted(found)


def own_public_key(directory: Path) -> str:
    """
    Return the public key of the storage server in a directory.

    Raises:
        UsageError: the server has no public key yet, or the file has something else.
    """
    path = directory / "node.pubkey"
    try:
        text = read_file(path, MAX_FILE_BYTES).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"no storage server was announced from {directory}: it has no node.pubkey; start one with "
            f"'pipegrid -d {directory} serve --introducer FURL', or name its directory with -d"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if public_key_bytes(text) is None:
        raise UsageError(f"{path} does not hold a public key; restore it")
    return text


def install(
    directory: Path, public_key: str, manager: str, data: bytes, source: str
) -> CertificateTerms:
    """
    Install a certificate in a server's directory, in place of an earlier one of the same manager.

    Args:
        public_key: the server's public key.
        manager: the user's name for the grid manager.
        source: the origin of the certificate, for errors.

    Raises:
        UsageError: the data are not a certificate for this server, it has expired, the name cannot be used,
            or the file cannot be written.
        SinkError: the disk is full.
    """
    if not manager.isprintable() or "/" in manager or not manager.strip() or manager[0] in ".-":
        raise UsageError(
            f"'{printable(manager[:20])}' cannot be a grid manager's name, after which a file is named; "
            "choose one without slashes"
        )
    if len(manager) > _MAX_NAME_CHARACTERS:
        raise UsageError(
            f"a grid manager's name has at most {_MAX_NAME_CHARACTERS} characters; choose a shorter one"
        )
    signed = _parsed(data, source)
    terms = terms_of(signed)
    assert terms is not None  # ``_parsed`` has checked it
    if terms.public_key != public_key:
        raise UsageError(
            f"{source} is a certificate for {printable(terms.public_key[:60])}, and the server in "
            f"{directory} has {public_key}; ask the grid manager for one for this key"
        )
    if terms.expires_s <= time.time():
        raise UsageError(
            f"{source} expired on {terms.minute}; ask the grid manager for a new certificate"
        )
    path = path_of(directory, manager)
    try:
        make_directory(path.parent)
        replace_file(path, data, mode=0o644)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}; nothing was changed"
        if error.errno in FULL:
            raise SinkError(f"{text}; free some space") from error
        raise UsageError(f"{text}; make it writable") from error
    return terms


# The certificates that a running server announces.


@attrs.define(eq=False, repr=False)
class CertificateWatch:
    """
    Reads the certificates of a server, and logs problems with them; each problem is logged once, until it
    changes.

    Args:
        files: files of certificates, in addition to those in the directory.
        directory: the server's directory.
        public_key: the server's public key; certificates for other servers are not announced.
        now: returns the time, in seconds since 1970.
    """

    _files: Sequence[Path]
    _directory: Path
    _public_key: str
    _now: Callable[[], float] = time.time
    _said: dict[Path, str] = attrs.field(factory=dict)
    _complaint: str = ""

    def read(self) -> list[dict[str, str]]:
        """
        Return the certificates to announce, those that are valid longest first. There are at most
        ``MAX_CERTIFICATES``, since clients verify no more.

        Raises:
            UsageError: a file has no certificate, or the files cannot be listed.
        """
        found = {}
        for path in (*self._files, *installed_files(self._directory)):
            signed = read_certificate(path)
            terms = terms_of(signed)
            assert terms is not None  # ``read_certificate`` has checked it
            found[path] = terms, signed
        self._said = {path: self._say(path, terms) for path, (terms, _) in found.items()}
        ours = [each for each in found.values() if each[0].public_key == self._public_key]
        ours.sort(key=lambda each: each[0].expires_s, reverse=True)
        return [signed._asdict() for _, signed in ours[:MAX_CERTIFICATES]]

    def look(self) -> list[dict[str, str]] | None:
        """Return the certificates like ``read``; if a file cannot be used, log that and return None."""
        try:
            found = self.read()
        except UsageError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                log.warn("{reason}; the certificates that were announced remain", reason=str(error))
            return None
        self._complaint = ""
        return found

    def _say(self, path: Path, terms: CertificateTerms) -> str:
        """Log the state of a certificate, if it has changed since the last call; returns the state."""
        left_s = terms.expires_s - self._now()
        fields = {"path": str(path), "day": terms.minute}
        if terms.public_key != self._public_key:
            other = printable(terms.public_key[:60])
            state = f"of another server, {other}"
            text = "certificate {path} is not announced: it is for the server {other}, and this one is {own}"
            fields |= {"other": other, "own": self._public_key}
        elif left_s <= 0:
            state = f"expired {fields['day']}"
            text = (
                "certificate {path} expired on {day}: clients of its grid manager store nothing new here; "
                "ask for a new one"
            )
        elif left_s <= NEAR_EXPIRY_S:
            state = f"near {fields['day']}"
            text = (
                "certificate {path} expires in {left}, on {day}; ask its grid manager for a new one"
            )
            fields["left"] = in_words(left_s)
        else:
            state, text = f"valid {fields['day']}", "certificate {path} is valid until {day}"
        if self._said.get(path) != state:
            (log.info if state.startswith("valid") else log.warn)(text, **fields)
        return state

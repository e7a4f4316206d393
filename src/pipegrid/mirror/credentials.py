"""Credentials of mirrors: ``~/.netrc``, apt's ``auth.conf``, users in URLs, and TLS certificates."""

from __future__ import annotations

import os
import stat
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from ssl import SSLContext

# A credential is used only for the scheme, host, port and path that it names; after a redirect, the
# credential of the new host is used. Messages contain the names of the files, but no credentials.
#
# ``~/.netrc`` applies to http and https, as in curl. In apt's files an entry without a scheme applies only to
# https; an entry may have a port and a path, and applies to everything below that path. The first match is
# used; apt's files come before ``~/.netrc``.

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 256
MAX_ENTRIES = 4096

_PORTS = {"http": 80, "https": 443}


class _Entry(NamedTuple):
    schemes: tuple[str, ...]
    host: str | None
    port: int | None
    path: str
    header: bytes

    def fits(self, scheme: str, host: str, port: int, path: str) -> bool:
        return (
            scheme in self.schemes
            and self.host in (None, host)
            and self.port in (None, port)
            and (path == self.path or path.startswith(self.path.rstrip("/") + "/"))
        )


class Credentials:
    """
    The credentials in some files.

    Attributes:
        warnings: sentences about files that cannot be read, are too large, or can be read by other users.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._entries: list[_Entry] = []

    def __repr__(self) -> str:
        return f"<Credentials of {len(self._entries)} machines>"

    def header_for(self, url: str) -> bytes:
        """
        Return the header line for a URL, including its line end; b"" if there are no credentials for the URL.
        """
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
        port = parts.port or _PORTS.get(parts.scheme, 0)
        found = (e for e in self._entries if e.fits(parts.scheme, host, port, parts.path or "/"))
        return next((each.header for each in found), b"")

    def read(self, path: Path, of_apt: bool) -> None:
        """Add the credentials of a file, if it exists; ``of_apt``: of one of apt's files."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.warnings.append(f"{path} cannot be read ({error.strerror}); it is left out")
            return
        if len(data) > MAX_FILE_BYTES:
            self.warnings.append(f"{path} has more than {MAX_FILE_BYTES} bytes; it is left out")
            return
        if (status.st_mode & 0o077 and not of_apt) or status.st_mode & 0o007:
            self.warnings.append(
                f"{path} has passwords and can be read by other users; use chmod 600"
            )
        before = len(self._entries)
        for entry in _entries(data.decode("utf-8", "replace"), of_apt):
            if len(self._entries) - before >= MAX_ENTRIES:
                self.warnings.append(f"{path} has more than {MAX_ENTRIES} machines")
                break
            self._entries.append(entry)


def read_credentials(environment: Mapping[str, str], apt: str) -> Credentials:
    """
    Return the credentials of apt's files and of ``~/.netrc`` (or of the file that ``NETRC`` names).

    Args:
        apt: the directory of apt's configuration, such as ``/etc/apt``.
    """
    found = Credentials()
    found.read(Path(apt, "auth.conf"), True)
    parts = Path(apt, "auth.conf.d")
    try:
        names = sorted(each for each in os.listdir(parts) if each.endswith(".conf"))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        names = []
        found.warnings.append(f"{parts} cannot be read ({error.strerror}); it is left out")
    for name in names[:MAX_FILES]:
        found.read(parts / name, True)
    netrc = environment.get("NETRC") or (
        os.path.join(environment["HOME"], ".netrc") if environment.get("HOME") else ""
    )
    if netrc:
        found.read(Path(netrc), False)
    return found


def user_of(url: str) -> tuple[str, bytes]:
    """Return a URL without its user and password, and the header line for these, or b""."""
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    if not (mark and at):
        return url, b""
    name, _, password = user.partition(":")
    header = _basic(unquote_to_bytes(name), unquote_to_bytes(password))
    return f"{scheme}://{host}{slash}{path}", header


def _basic(user: bytes, password: bytes) -> bytes:
    return b"Authorization: Basic %s\r\n" % b64encode(user + b":" + password)


def _entries(text: str, of_apt: bool) -> Iterator[_Entry]:
    words = iter(_words(text))
    machine: str | None = None
    is_begun = False
    said: dict[str, str] = {}
    for word in words:
        if word in ("machine", "default"):
            if is_begun:
                yield from _entry(machine, said, of_apt)
            machine = next(words, "") if word == "machine" else None
            is_begun, said = True, {}
        elif word in ("login", "password", "account"):
            said.setdefault(word, next(words, ""))
    if is_begun:
        yield from _entry(machine, said, of_apt)


def _words(text: str) -> Iterator[str]:
    """Yield the words of a file, without comments and macros; quotes mean the same as in curl."""
    in_macro = False
    for line in text.split("\n"):
        stripped = line.strip()
        if in_macro:
            in_macro = bool(stripped)
            continue
        if stripped.startswith("#"):
            continue
        for word in stripped.split():
            if word == "macdef":
                in_macro = True
                break
            quoted = len(word) > 1 and word[0] == word[-1] == '"'
            yield word[1:-1].replace('\\"', '"') if quoted else word


def _entry(machine: str | None, said: Mapping[str, str], of_apt: bool) -> Iterator[_Entry]:
    if "login" not in said and "password" not in said:
        return
    header = _basic(said.get("login", "").encode(), said.get("password", "").encode())
    both = ("http", "https")
    if machine is None:
        if not of_apt:
            yield _Entry(both, None, None, "/", header)
        return
    schemes: tuple[str, ...] = ("https",) if of_apt else both
    scheme, mark, rest = machine.partition("://")
    if mark:
        schemes, machine = (scheme.lower(),), rest
    try:
        parts = urlsplit(f"//{machine}")
        port = parts.port
    except ValueError:
        return
    if parts.hostname:
        yield _Entry(schemes, parts.hostname.lower(), port, parts.path or "/", header)


# TLS: the certificate authorities of a run, and the client's certificate.
#
# The client's certificate is used only for hosts that the run names, not for hosts that these redirect to.
# All files are read, and errors reported, before the first connection.


class TlsFiles:
    """
    The certificate authorities that a run trusts, and the client's certificate; from PEM files.

    Args:
        ca: the authorities that are trusted instead of the system's; None for the system's.
        certificate: of the client, optionally with intermediate certificates and with its key.
        key: of the certificate; None if it is in the same file.

    Raises:
        UsageError: a file cannot be read or used.

    Attributes:
        ca, certificate, key: the contents of the files; b"" if not given.
        warnings: sentences about files that other users can read.
    """

    def __init__(
        self, ca: str | None = None, certificate: str | None = None, key: str | None = None
    ) -> None:
        if key is not None and certificate is None:
            raise UsageError(
                "a key is of no use without its certificate; give --client-cert FILE as well"
            )
        self._shown_to: set[tuple[str, int]] = set()
        self.warnings: list[str] = []
        self.ca = self._read("--ca", ca)
        self.certificate = self._read("--client-cert", certificate)
        self.key = self._read("--client-key", key or certificate, is_secret=True)
        self._plain = _trusting(ca)
        self._showing = self._plain
        if certificate is not None:  # reading the system's authorities twice takes 20 ms
            self._showing = _trusting(ca)
            _load_certificate(self._showing, certificate, key)

    def show_to(self, url: str) -> None:
        """Allow the host of a URL to get the client's certificate."""
        with_port = urlsplit(url)
        if with_port.hostname:
            self._shown_to.add((with_port.hostname.lower(), with_port.port or 443))

    def is_shown_to(self, host: str, port: int) -> bool:
        """Return whether a host may get the client's certificate."""
        return bool(self.certificate) and (host.lower(), port) in self._shown_to

    def context(self, host: str, port: int) -> SSLContext:
        """Return the TLS context for connections to a host."""
        return self._showing if self.is_shown_to(host, port) else self._plain

    def _read(self, option: str, path: str | None, is_secret: bool = False) -> bytes:
        if path is None:
            return b""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(fd)
                data = os.read(fd, MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
            finally:
                os.close(fd)
        except OSError as error:
            raise UsageError(
                f"{option} {path} cannot be read ({error.strerror}); give another file"
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{option} {path} is not a file; give a file in PEM")
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(
                f"{option} {path} has more than {MAX_FILE_BYTES} bytes; give another file"
            )
        if is_secret and status.st_mode & 0o007:
            self.warnings.append(f"{path} has a key and can be read by other users; use chmod 600")
        return data


def _trusting(ca: str | None) -> SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError):
        context = None
    if context is None or (ca is not None and not context.cert_store_stats()["x509"]):
        raise UsageError(f"--ca {ca} has no certificate in PEM; give a file that has one")
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load_certificate(context: SSLContext, certificate: str, key: str | None) -> None:
    import ssl

    protected: list[str] = []

    def password() -> str:
        protected.append(key or certificate)
        return ""

    try:
        context.load_cert_chain(certificate, key, password)
    except (OSError, ValueError) as error:
        if protected:
            raise UsageError(
                f"the key in {protected[0]} needs a passphrase; give one that does not (openssl pkey)"
            ) from None
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"the key in {key or certificate} is not that of the certificate in {certificate}; give the "
                "one that belongs to it"
            ) from None
        raise UsageError(
            f"{certificate} has no certificate in PEM, or {key or certificate} no key; give files that have"
        ) from None

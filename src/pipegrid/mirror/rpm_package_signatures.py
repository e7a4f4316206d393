"""
The signatures in the headers of RPM packages, checked by rpm's own program.

Results are recorded by hash, together with the hash of the keys, so that a package is checked once.
Synchronous, for the thread that has the destination.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path

from pipegrid.errors import UsageError
from pipegrid.mirror import HIDDEN
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.destination import Destination

CHECKED = "checked"
"""The records, below ``HIDDEN``."""

MAX_NOTES_BYTES = 64 << 20
MAX_KEY_BYTES = 4 << 20
AT_ONCE = 64
"""Packages that one process checks."""

TIMEOUT_S = 600.0

Failed = Callable[[ArchiveFile, str], None]


def check_packages(
    destination: Destination,
    packages: Iterable[ArchiveFile],
    keyrings: Sequence[str],
    failed: Failed,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """
    Check that packages that exist are signed by one of some keys.

    Args:
        keyrings: files with public keys, bytes or text.
        failed: is called with each that is not, and the reason.
        stopped: whether the run must end.

    Raises:
        MirrorError: rpmkeys does not exist, or accepts no key; or the run must end.
        UsageError: a file with keys cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="pipegrid-") as home:
        texts = [_text_of(each, home) for each in keyrings]
        known = b"".join(sorted(sha256(each).digest() for each in texts))
        head = sha256(known).hexdigest()
        notes = (destination.read(f"{HIDDEN}/{CHECKED}", MAX_NOTES_BYTES) or b"").decode(
            "ascii", "replace"
        )
        lines = notes.splitlines()
        right = set(lines[1:]) if lines[:1] == [head] else set()
        before = len(right)
        keys = Path(home, "keys")
        for number, text in enumerate(texts):
            path = keys.with_suffix(f".{number}")
            path.write_bytes(text)
            _run(["rpmkeys", "--dbpath", f"{home}/db", "--import", str(path)], home)
        missing = (each for each in packages if each.digest.hex() not in right)
        while chunk := list(islice(missing, AT_ONCE)):
            if stopped():
                raise MirrorError("stopped while signatures were checked; run it again")
            for each, why in _found(destination, chunk, home):
                if why:
                    failed(each, why)
                else:
                    right.add(each.digest.hex())
        if len(right) > before:
            destination.keep_own(CHECKED, "\n".join([head, *sorted(right)]).encode("ascii"))


def _text_of(keyring: str, home: str) -> bytes:
    """Return keys as text, the only form that rpmkeys reads."""
    try:
        with open(keyring, "rb") as file:
            data = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"{keyring} cannot be read: {error.strerror}") from error
    if data.lstrip().startswith(b"-----BEGIN"):
        return data
    gpg = ["gpg", "--homedir", home, "--batch", "--no-options", "--no-default-keyring"]
    return _run([*gpg, "--keyring", os.path.abspath(keyring), "--armor", "--export"], home)


def _run(command: list[str], home: str, refuses: bool = True) -> bytes:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "HOME": home}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise MirrorError(
            f"packages cannot be checked, since there is no {command[0]}; install it, or leave out --gpgcheck"
        ) from None
    except subprocess.TimeoutExpired:
        raise MirrorError(f"{command[0]} took more than {TIMEOUT_S:.0f} s; run it again") from None
    if done.returncode and refuses:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise MirrorError(f"{command[0]} accepts no key: {' '.join(said)}; look at --keyring")
    return done.stdout


def _found(
    destination: Destination, packages: Sequence[ArchiveFile], home: str
) -> Iterator[tuple[ArchiveFile, str]]:
    """Yield the fault of the signature of each package that exists; "" if it is right."""
    places = {destination.where(each.path): each for each in packages}
    there = [place for place in places if os.path.isfile(place)]
    command = ["rpmkeys", "--dbpath", f"{home}/db", "--checksig", "--verbose", "--", *there]
    said = _run(command, home, refuses=False).decode("utf-8", "surrogateescape") if there else ""
    reasons = dict.fromkeys(there, "rpmkeys does not mention it")
    place = ""
    for line in said.splitlines():
        if line[:1] not in (" ", "\t") and line.removesuffix(":") in reasons:
            place = line.removesuffix(":")
            reasons[place] = "no signature is in it"
        elif place and "ignature" in line and reasons[place] in ("", "no signature is in it"):
            is_right = line.rstrip().endswith(": OK")
            reasons[place] = "" if is_right else f"rpmkeys says {line.strip()!r}"
        elif place and not line.rstrip().endswith(": OK"):
            reasons[place] = f"rpmkeys says {line.strip()!r}"
    for place in there:
        yield places[place], reasons[place]

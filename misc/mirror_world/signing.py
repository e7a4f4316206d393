"""The key that signs repositories of this world: made when it is first needed, and gone with the process."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from misc.mirror_world.packages import run

NAME = "Test <test@example.com>"


@lru_cache(maxsize=1)
def home() -> Path:
    """Return gpg's directory, with a key in it that needs no passphrase."""
    made = Path(tempfile.mkdtemp(prefix="pg-world-key-"))
    atexit.register(_remove, made)
    made.chmod(0o700)
    _gpg(made, "--passphrase", "", "--quick-generate-key", NAME, "rsa3072", "sign", "never")
    (made / "key.asc").write_bytes(_gpg(made, "--armor", "--export"))
    return made


def public_key() -> Path:
    """Return the file that readers and mirrors know the key by."""
    return home() / "key.asc"


def _gpg(directory: Path, *arguments: str) -> bytes:
    return run("gpg", "--homedir", str(directory), "--batch", "--quiet", "--yes", *arguments)


def _remove(directory: Path) -> None:
    stop = ("gpgconf", "--homedir", str(directory), "--kill", "all")
    subprocess.run(stop, check=False, capture_output=True, timeout=60)
    shutil.rmtree(directory, ignore_errors=True)


def sign_release(directory: Path) -> None:
    """Sign the ``Release`` of a directory, in it and beside it."""
    release = str(directory / "Release")
    _gpg(home(), "--output", str(directory / "InRelease"), "--clearsign", release)
    _gpg(home(), "--output", f"{release}.gpg", "--armor", "--detach-sign", release)


def sign_repomd(root: Path) -> None:
    """Sign the ``repomd.xml`` of a repository, beside it."""
    repomd = str(root / "repodata" / "repomd.xml")
    _gpg(home(), "--output", f"{repomd}.asc", "--armor", "--detach-sign", repomd)


def sign_packages(directory: Path) -> None:
    """Sign the RPM packages of a directory, in their headers."""
    defined = {"_gpg_name": NAME, "_gpg_path": str(home()), "__gpg": shutil.which("gpg") or "gpg"}
    given = [word for name, value in defined.items() for word in ("--define", f"{name} {value}")]
    run("rpmsign", *given, "--addsign", *map(str, sorted(directory.rglob("*.rpm"))))


def with_key(*command: str) -> None:
    """Run a program that signs by itself."""
    before = os.environ.get("GNUPGHOME")
    os.environ["GNUPGHOME"] = str(home())
    try:
        run(*command)
    finally:
        if before is None:
            del os.environ["GNUPGHOME"]
        else:
            os.environ["GNUPGHOME"] = before

"""
Where and with what a run was measured: commit, versions, machine.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import pipegrid
from pipegrid.core import erasure

_LIBRARIES = ("Twisted", "cryptography", "pycryptodome", "zfec", "httptools", "foolscap")


def commit() -> str | None:
    """Return the commit of the working copy that this package is in, ``+`` behind it if it was changed."""
    here = Path(pipegrid.__file__).resolve().parent
    root = here.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of pipegrid, python, and libraries that matter."""
    found = {"pipegrid": pipegrid.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name.lower()] = importlib.metadata.version(name)
    return found


def machine() -> dict[str, str]:
    """Return what figures depend on besides."""
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cores": str(os.cpu_count() or "?"),
        "erasure": erasure.library(),
    }
    with contextlib.suppress(OSError, ValueError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["memory"] = f"{memory / 2**30:.1f} GiB"
    return found

"""Packages to put into repositories, and the programs that are run for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TIMEOUT_S = 120

SPEC = """\
Name: {name}
Version: {version}
Release: 1
Summary: nothing & <less>
License: MIT
BuildArch: noarch
%description
nothing
%files
"""


def run(*command: str, cwd: Path | None = None, home: Path | None = None) -> bytes:
    """
    Run a program; returns what it prints.

    Raises:
        RuntimeError: it fails; the text has what it says.
    """
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    if home is not None:
        environment["HOME"] = str(home)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {said[-2000:]}")
    return done.stdout


def make_debs(directory: Path, names: tuple[str, ...], kind: str = "deb") -> None:
    """Make a small package of each name in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        root = directory / f"{name}.root"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN" / "control").write_text(
            f"Package: {name}\nVersion: 1.0+b1\nArchitecture: amd64\nMaintainer: T <t@example.com>\n"
            "Section: misc\nPriority: optional\nDescription: nothing\n more of it\n"
        )
        (root / "usr").mkdir()
        (root / "usr" / name).write_text(name * 100)
        run("dpkg-deb", "--build", str(root), str(directory / f"{name}_1.0+b1_amd64.{kind}"))
        run("rm", "-r", str(root))


def make_rpms(directory: Path, names: tuple[str, ...]) -> None:
    """Make a small package of each name in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    work = directory.parent / f"{directory.name}.build"
    work.mkdir()
    for name in names:
        spec = work / f"{name}.spec"
        spec.write_text(SPEC.format(name=name, version="1.0"))
        top = ("--define", f"_topdir {work}", "--define", f"_rpmdir {work}/out")
        run("rpmbuild", "-bb", "--quiet", *top, str(spec))
    for path in (work / "out").rglob("*.rpm"):
        path.rename(directory / path.name)
    run("rm", "-r", str(work))

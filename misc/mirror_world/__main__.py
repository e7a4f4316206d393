"""
``python -m misc.mirror_world [NAME ...]``: make repositories, mirror each, and look whether apt or dnf gets
the same from the mirror as from the repository itself.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from misc.mirror_world import debian, rpm
from misc.mirror_world.case import Case
from misc.mirror_world.packages import run
from misc.mirror_world.readers import read, served
from misc.mirror_world.signing import public_key

LEAST = 40
"""Repositories that this world has at least."""


def all_cases() -> list[Case]:
    """Return all repositories of this world."""
    return [*debian.cases(), *rpm.cases()]


def check(case: Case) -> int:
    """
    Make a repository, mirror it, read both.

    Returns:
        How many packages were the same.

    Raises:
        RuntimeError: a program failed, or they are not the same.
    """
    with tempfile.TemporaryDirectory(prefix="pg-world-") as place:
        source, dest = Path(place, "source"), Path(place, "dest")
        case.make(source)
        with served(source) as url:
            theirs = read(case, url)
            _mirror(case, url, dest)
        with served(dest) as url:
            ours = read(case, url)
    if ours != theirs:
        raise RuntimeError(f"{case.name}: {sorted(theirs.items() ^ ours.items())} differ")
    return len(ours)


def _mirror(case: Case, url: str, dest: Path) -> None:
    kind = "debian" if case.suite else "rpm"
    options = [f"--suite={case.suite}"] if case.suite else []
    options += [f"--component={each}" for each in case.components]
    if case.is_signed:
        options += [f"--keyring={public_key()}", *([] if case.suite else ["--gpgcheck"])]
    else:
        options.append("--allow-unsigned")
    command = (
        sys.executable,
        "-m",
        "pipegrid",
        "mirror",
        kind,
        str(dest),
        "--from",
        url,
    )
    try:
        run(*command, *options)
    except RuntimeError as error:
        if not (case.is_skipping and " skipped" in str(error) and "failed (1)" in str(error)):
            raise
    run(sys.executable, "-m", "pipegrid", "mirror", "verify", str(dest), "--paranoid")


def main(names: list[str]) -> int:
    """Check those repositories, or all; returns the exit status."""
    failed = []
    chosen = [each for each in all_cases() if not names or each.name in names]
    for case in chosen:
        begin = time.monotonic()
        try:
            said = f"{check(case)} packages are the same"
        except RuntimeError as error:
            failed.append(case.name)
            said = f"FAILED: {error}"
        print(f"{case.name}: {said} ({time.monotonic() - begin:.1f} s)", flush=True)
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} repositories are mirrored as apt and dnf read them"
    )
    return 1 if failed or len(chosen) < (1 if names else LEAST) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

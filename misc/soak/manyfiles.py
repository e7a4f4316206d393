"""
How much memory a backup of many small files takes, and how many files a second it stores.

    python misc/soak/manyfiles.py [--files 100000] [--directory DIR]

Makes files of 20 B to 2 kB, a hundred to a directory, on an embedded grid in DIR (removed afterwards), and
runs ``backup`` twice, ``put -r`` and ``restore`` on them as processes of their own. One JSON line each. The
target of 200 MiB counts the client and the ten servers, which are one process there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

MAX_RSS_MIB = 200


def make_files(root: Path, count: int) -> None:
    """Write them; the same ones every time."""
    random = Random(1)
    for number in range(count):
        directory = root / f"{number // 10_000}/{number // 100}"
        if number % 100 == 0:
            directory.mkdir(parents=True)
        size = random.randrange(20, 80) if number % 3 else random.randrange(80, 2000)
        (directory / f"file{number}").write_bytes(random.randbytes(size))


def measured(home: Path, *arguments: str) -> dict[str, float | str]:
    """Run a command; return what it took."""
    environment = {**os.environ, "PIPEGRID_DIR": str(home / "client")}
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipegrid.cli", "-q", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "command": arguments[0],
        "status": process.returncode,
        "seconds": round(time.monotonic() - began_s, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "max_rss_mib": round(used.ru_maxrss / 1024, 1),
    }


def main() -> int:
    """Measure; the status is 1 if a command failed or took more memory than it may."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="pipegrid-manyfiles-", dir=options.directory))
    failed = False
    try:
        source = home / "source"
        make_files(source, options.files)
        for arguments in (
            ("backup", str(source)),
            ("backup", str(source)),
            ("put", "-r", str(source)),
            ("restore", "-o", str(home / "back")),
        ):
            took = measured(home, *arguments)
            seconds = float(took["seconds"])
            took["files_per_s"] = round(options.files / max(seconds, 0.01))
            print(json.dumps({"files": options.files, **took}), flush=True)
            failed |= took["status"] != 0 or float(took["max_rss_mib"]) > MAX_RSS_MIB
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

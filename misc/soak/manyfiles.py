"""
How much memory trees of many small files take, and how many files a second come and go.

    python -m misc.soak.manyfiles [--files 100000] [--a-directory 100] [--largest 2000] [--directory DIR]

Makes files of 20 B to 2 kB, so many to a directory, on an embedded grid in DIR (removed afterwards). Runs
``backup`` (twice), ``put -r``, ``get -r`` (twice, and once more when a third is gone), ``check -r``, the
same with ``--verify``, ``renew -r``, ``restore``, ``ls -R``, ``du``, ``stats`` and ``manifest`` on them, as
processes of their own; beside them ``cp -r`` on the same disk. Then some of each hundred files are changed,
moved, removed, new, or merely touched: they are backed up, and the newest run, the first one, and one file of
that are restored. What came back is compared, byte for byte. One JSON line each, with the memory at every
fifth of the time, which shows whether it grows. The target of 200 MiB counts client and servers, one process.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from misc.command import environment
from misc.scratch import scratch_directory

MAX_RSS_MIB = 200
_SAMPLE_S = 0.1
_POINTS = 6
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20


def make_files(root: Path, count: int, a_directory: int, largest: int) -> None:
    """Write them, so many to a directory and a hundred directories in one; the same ones every time."""
    random = Random(1)
    for number in range(count):
        which = number // a_directory
        directory = root / f"{which // 100}/{which}"
        if number % a_directory == 0:
            directory.mkdir(parents=True)
        size = random.randrange(20, 80) if number % 3 else random.randrange(80, 2000)
        (directory / f"file{number}").write_bytes(random.randbytes(min(size, largest)))


def change_files(root: Path) -> None:
    """Of each hundred files change one, touch one, remove one, move one, and make one that is new."""
    random = Random(2)
    files = sorted(each for each in root.rglob("file*") if each.is_file())
    for first in range(0, len(files), 100):
        changed, touched, removed, moved = random.sample(files[first : first + 100], 4)
        changed.write_bytes(random.randbytes(random.randrange(20, 2000)))
        os.utime(touched)
        removed.unlink()
        moved.rename(root / "0" / f"moved{first}")
        changed.with_name(f"new{first}").write_bytes(random.randbytes(500))


def remove_a_third(root: Path) -> None:
    """Remove every third file, and cut the one behind it off, as a run that was killed may leave it."""
    for number, each in enumerate(sorted(root.rglob("file*"))):
        if number % 3 == 0:
            each.unlink()
        elif number % 3 == 1:
            os.truncate(each, each.stat().st_size // 2)


def measured(arguments: Sequence[str], client: Path, output: Path) -> dict[str, Any]:
    """
    Run a program; return what it took.

    Args:
        client: the directory of PipeGrid's client, which it makes.
        output: where its standard output goes.
    """
    began_s = time.monotonic()
    held: list[int] = []
    with open(output, "wb") as file:
        process = subprocess.Popen(
            arguments, env=environment() | {"PIPEGRID_DIR": str(client)}, stdout=file
        )
    ended = 0
    while not ended:
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        held.append(_held_bytes(process.pid))
        if not ended:
            time.sleep(_SAMPLE_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    seen = [each for each in held if each] or [0]
    return {
        "status": process.returncode,
        "seconds": round(time.monotonic() - began_s, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "max_rss_mib": round(used.ru_maxrss / 1024, 1),
        "rss_mib": [
            round(seen[(len(seen) - 1) * point // (_POINTS - 1)] / _MIB) for point in range(_POINTS)
        ],
    }


def _held_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def same_trees(one: Path, other: Path) -> bool:
    """Whether two directories hold the same names and bytes."""
    found = filecmp.dircmp(one, other, ignore=[])
    if not other.is_dir() or found.left_only or found.right_only or found.common_funny:
        return False
    _, differ, unread = filecmp.cmpfiles(one, other, found.common_files, shallow=False)
    return not (differ or unread) and all(
        same_trees(one / name, other / name) for name in found.common_dirs
    )


def main() -> int:
    """Measure; the status is 1 if something failed, took more memory than it may, or came back otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--a-directory", type=int, default=100, help="files in each directory")
    parser.add_argument("--largest", type=int, default=2000, help="bytes of a file, at most")
    parser.add_argument("--directory", type=scratch_directory, default=None)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="pipegrid-manyfiles-", dir=options.directory))
    failed = False
    try:
        source, output, client = home / "source", home / "output", home / "client"
        shape = {"files": options.files, "a_directory": options.a_directory}
        make_files(source, options.files, options.a_directory, options.largest)

        def run(what: str, *arguments: str, ours: bool = True) -> str:
            nonlocal failed
            program = [sys.executable, "-m", "pipegrid.cli", "-q"] if ours else []
            took = measured([*program, *arguments], client, output)
            took["files_per_s"] = round(options.files / max(float(took["seconds"]), 0.01))
            print(json.dumps({"command": what, **shape, **took}), flush=True)
            failed |= took["status"] != 0 or (ours and float(took["max_rss_mib"]) > MAX_RSS_MIB)
            return output.read_text("utf-8").strip()

        def compare(with_: Path, name: str) -> None:
            nonlocal failed
            same = same_trees(with_, home / name)
            print(json.dumps({"compared": name, "same": same}), flush=True)
            failed |= not same

        run("cp -r", "cp", "-r", str(source), str(home / "copy"), ours=False)
        run("backup", "backup", str(source))
        run("backup, nothing changed", "backup", str(source))
        then = time.strftime("%Y-%m-%d_%H:%M:%S", time.gmtime())
        cap = run("put -r", "put", "-r", str(source))
        get = "get", "-r", cap, "-o", str(home / "got")
        run("get -r", *get)
        run("get -r, all there", *get)
        remove_a_third(home / "got")
        run("get -r, a third gone, and a third cut off", *get, "-f")
        for words in (
            *(("check", "-r"), ("check", "-r", "--verify"), ("renew", "-r")),
            *(("ls", "-R"), ("du",), ("stats",), ("manifest",)),
        ):
            run(" ".join(words), *words, cap)
        run("restore", "restore", "-o", str(home / "back"))
        compare(source, "got")
        compare(source, "back")
        change_files(source)
        run("backup, some changed", "backup", str(source))
        run("restore, some changed", "restore", "-o", str(home / "newest"))
        compare(source, "newest")
        run("restore --at", "restore", "--at", then, "-o", str(home / "first"))
        compare(home / "copy", "first")
        one = next((home / "copy").rglob("file*"))
        path = str(one.relative_to(home / "copy"))
        catalogue = (client / "private/backup/catalogue.cap").read_text().strip()
        at = "restore", catalogue, path, "--as", "source", "--at", then
        run("restore of one file", *at, "-o", str(home / "one"))
        same = (home / "one" / one.name).read_bytes() == one.read_bytes()
        print(json.dumps({"compared": "one", "same": same}), flush=True)
        failed |= not same
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

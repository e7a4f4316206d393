"""
``mirror rpm`` and librepo, on which dnf stands: 1,500 packages, an empty directory each time.

librepo is told what there is (dnf knows it by then), asks 20 at once, as many as it may, and verifies what
comes; we read the repository's index first. It is run by the system's Python (Debian: python3-librepo).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tests.mirror.rpmarchive import Made, RpmArchive

from misc.command import environment
from misc.speedtest.mirror.archive import SMALL, Package, Shape
from misc.speedtest.mirror.bench import Bench
from misc.speedtest.mirror.clone import hashing_s
from misc.speedtest.mirror.runs import Run, ratio, summed_up
from misc.speedtest.mirror.tools import Call

PYTHON = "/usr/bin/python3"
SHAPE = Shape("rpm", 1_500, 60_000_000, 1.75)
TARGET = 3.0

_PROGRAM = """
import json, os, sys, librepo
url, dest, listed = sys.argv[1:]
handle = librepo.Handle()
handle.repotype = librepo.LR_YUMREPO
handle.urls = [url]
handle.maxparalleldownloads = handle.maxdownloadspermirror = 20
targets = []
for path, sha256, size in json.load(open(listed)):
    os.makedirs(os.path.join(dest, os.path.dirname(path)), exist_ok=True)
    targets.append(librepo.PackageTarget(path, handle=handle, dest=os.path.join(dest, path),
        checksum_type=librepo.SHA256, checksum=sha256, expectedsize=size))
librepo.download_packages(targets, failfast=True)
"""


def has_librepo() -> bool:
    """Whether it is installed."""
    try:
        return not subprocess.run([PYTHON, "-c", "import librepo"], capture_output=True).returncode
    except OSError:
        return False


def rpm_clone(bench: Bench) -> None:
    """At 20 ms, and without a round trip."""
    place = bench.place()
    shape = Shape("tiny-rpm", 60, SMALL.size_bytes // 100, 1.5) if bench.tiny else SHAPE
    packages = _make(place / "root", shape, bench)
    listed = place / "list.json"
    listed.write_text(json.dumps([(each.path, each.sha256, each.size) for each in packages]))
    size_bytes = sum(each.size for each in packages)
    for rtt_ms in (20.0, 0.0):
        ours: list[Run] = []
        theirs: list[Run] = []
        with (
            bench.server(place / "root") as server,
            bench.behind_link([server], rtt_ms) as addresses,
        ):
            url = f"http://{addresses[0]}/"
            for _ in range(bench.rounds):
                dest = bench.place()
                command = [sys.executable, "-m", "pipegrid.cli", "--json", "mirror", "rpm"]
                command += [str(dest / "tree"), "--from", url, "--allow-unsigned"]
                call = Call(command, dest / "tree", environment())
                ours.append(bench.measured(call, dest, packages))
                shutil.rmtree(dest)
                if has_librepo():
                    dest = bench.place()
                    command = [PYTHON, "-c", _PROGRAM, url, str(dest / "tree"), str(listed)]
                    theirs.append(bench.measured(Call(command, dest / "tree"), dest, packages))
                    shutil.rmtree(dest)
        peers = {}
        if theirs:
            peers = {
                "librepo": summed_up(theirs),
                "times_as_fast": round(ratio(theirs, ours), 2),
                "target": TARGET if rtt_ms else None,
            }
        bench.tell(
            f"rpm-md: {len(packages)} packages, {size_bytes / 1e6:.0f} MB, {rtt_ms:g} ms",
            pipegrid=summed_up(ours),
            gb_per_s=round(size_bytes / min(each.seconds for each in ours) / 1e9, 3),
            one_core_hashes_gb_per_s=round(1e-9 / hashing_s(1), 2),
            **peers,
        )
    shutil.rmtree(place)


def _make(root: Path, shape: Shape, bench: Bench) -> list[Package]:
    made = RpmArchive(count=0)
    made.packages = [
        Made(f"p{number}", bench.rng.randbytes(size)) for number, size in enumerate(shape.sizes())
    ]
    made.publish()
    for path, data in made.files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    rows = []
    for each in made.packages:
        digest = sha256(each.data).hexdigest()
        rows.append(Package(each.name, each.path, len(each.data), digest, ""))
    return rows

"""
Stands for ``pipegrid speedtest`` where a build step is tested: does what a file tells it to, and at once.

    python -m tests.interop.buildbot_program SCRIPT --output DIR

SCRIPT is a file with a JSON object: ``mode``, one of ``good``, ``fails``, ``silent`` (no lines), ``empty``
(no JSON), ``strange`` (JSON of another version), and ``real`` (the real one, in its quickest way); ``seed``
and ``factor`` of ``make_run``; ``wait``, a file without which the test does not go on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.speedtest.test_buildresults import make_run

REPORT = """<!doctype html><title>Report</title><style>body { color: rgb(1, 2, 3) }</style>
<h1>Report of a speed test</h1>
"""


def main() -> int:
    """Do it; returns the exit status."""
    script = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    mode, wait = script["mode"], script.get("wait")
    if mode == "real":
        arguments = ["-m", "pipegrid.cli", "speedtest", "run", "--quick", *sys.argv[2:]]
        os.execv(sys.executable, [sys.executable, *arguments])
    run = make_run(script.get("seed", 1), script.get("factor", 1.0))
    figures = {(each.name, each.direction): each for each in run.measurements}
    print("round 1 of 5: 1MB: 0.4 s up", file=sys.stderr, flush=True)
    while wait is not None and not Path(wait).exists():
        time.sleep(0.05)
    if mode == "fails":
        print("pipegrid: the grid at 127.0.0.1 does not answer; start it", file=sys.stderr)
        return 1
    output = Path(sys.argv[sys.argv.index("--output") + 1])
    if mode != "empty":
        output.mkdir(exist_ok=True)
        if (output / "run.json").exists():
            print("an earlier build's results are still there", file=sys.stderr)
            return 1
        earlier = sorted(path.name for path in output.glob("history/*.json"))
        print(f"history: {' '.join(earlier)}")
        document = json.loads(run.as_json())
        if mode == "strange":
            document["version"] = 99
        (output / "run.json").write_text(json.dumps(document), "utf-8")
        (output / "report.html").write_text(REPORT, "utf-8")
    if mode == "silent":
        return 0
    for word, way in (("upload", "up"), ("download", "down")):
        small, large = figures["10x 200B", way], figures["1MB", way]
        print(f"{word} per-file time: {small.per_file_s:.3f}s")
        print(f"{word} per-file times-avg-RTT: {small.per_file_s / 0.01:f}")
        print(f"{word} speed (1MB): {large.bytes_per_s / 1000:.2f}kBps   90.1% of raw TCP; of 5")
    return 0


if __name__ == "__main__":
    sys.exit(main())

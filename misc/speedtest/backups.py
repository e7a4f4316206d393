"""
``pipegrid backup`` to ten servers of ours behind a link, and restic to ``rclone serve restic`` behind an
equal link, in turns (A B A B).

    python -m misc.speedtest.backups [--rtt-ms MS]... [--rounds N] [--files N] [--bytes N]

Each round has a new tree of random files. Five commands of each program are measured, from the start of the
process to its end: the first backup, the same again without changes, one with ten changed files, a check, and
a restore, whose files are compared. PipeGrid keeps 3-of-10 shares, so it sends 3.3 times the bytes, to
servers that share the processors with it; restic's store is one process that keeps one copy.

One JSON line for each command and round-trip time: both medians and spreads, PipeGrid's processor time, and
the ratio of both medians. The status is 1 if a ratio is above its target.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from misc.command import compile_package
from misc.ending import end_on_sigterm
from misc.speedtest.processes import Servers
from misc.speedtest.restic import Failed, Place, check_same, make_tree, ratio_fields, rclone_at
from misc.speedtest.trees.contents import change
from misc.speedtest.trees.sides import CommandFailed, Pipegrid, Runner, Took
from pipegrid.tree.backup.backup_database import RACY_NS

FIRST, SAME, TEN, CHECK, RESTORE = (
    "first backup",
    "nothing changed",
    "ten files changed",
    "check",
    "restore",
)
TARGETS = {
    20.0: {FIRST: 2.2, SAME: 0.4, TEN: 0.6, CHECK: 1.2, RESTORE: 1.6},
    100.0: {FIRST: 1.1, SAME: 0.3, TEN: 0.4, CHECK: 0.7, RESTORE: 1.1},
}
"""How many times restic's time, at most, by the round-trip time in milliseconds."""

CHANGED = 10


class Turns:
    """Both programs at one round-trip time, and what their commands took, in seconds."""

    def __init__(self, ours: Pipegrid, theirs: Place, scratch: Path, rng: random.Random) -> None:
        self._ours = ours
        self._theirs = theirs
        self._scratch = scratch
        self._rng = rng
        self.ours_s: dict[str, list[float]] = {}
        self.ours_cpu_s: dict[str, list[float]] = {}
        self.theirs_s: dict[str, list[float]] = {}

    def take(self, number: int, files: int, size: int) -> None:
        """
        Run every command of both programs once.

        Raises:
            Failed, CommandFailed: one failed, or restored other bytes.
        """
        tree = self._scratch / f"tree{number}"
        make_tree(tree, files, size, self._rng)
        self._theirs.run(tree.name, "init")
        ours_first = bool(number % 2)
        for step in (FIRST, SAME, TEN):
            if step is TEN:
                change(tree, CHANGED, self._rng)
            if step is not SAME:
                # Or else the next run would read again what changed so shortly before.
                time.sleep(1.1 * RACY_NS / 1e9)
            for is_ours in (ours_first, not ours_first):
                if is_ours:
                    cap = self._note(step, self._ours.backup(tree, tree.name)).said
                else:
                    self._note_restic(step, self._theirs.run(tree.name, "backup", str(tree)))
        self._note(CHECK, self._ours.check(cap))
        self._note_restic(CHECK, self._theirs.run(tree.name, "check"))
        target = self._scratch / "restored"
        self._note(RESTORE, self._ours.restore(tree.name, target))
        check_same(tree, target)
        shutil.rmtree(target)
        took_s = self._theirs.run(tree.name, "restore", "latest", "--target", str(target))
        self._note_restic(RESTORE, took_s)
        check_same(tree, target / tree.relative_to("/"))
        shutil.rmtree(target)
        shutil.rmtree(tree)
        self._ours.forget()

    def _note(self, step: str, took: Took) -> Took:
        print(f"pipegrid {step}: {took.seconds:.2f} s, cpu {took.cpu_s:.2f}", file=sys.stderr)
        self.ours_s.setdefault(step, []).append(took.seconds)
        self.ours_cpu_s.setdefault(step, []).append(took.cpu_s)
        return took

    def _note_restic(self, step: str, took_s: float) -> None:
        print(f"restic {step}: {took_s:.2f} s", file=sys.stderr)
        self.theirs_s.setdefault(step, []).append(took_s)

    def report(self, rtt_ms: float) -> Iterator[dict[str, object]]:
        """Yield what is printed of each command; what was taken first does not count."""
        for step, taken in self.ours_s.items():
            ours, theirs = taken[1:], self.theirs_s[step][1:]
            yield {
                "scenario": f"backup, {step}",
                "rtt_ms": rtt_ms,
                **ratio_fields(ours, theirs, TARGETS.get(rtt_ms, {}).get(step)),
                "pipegrid_s": round(statistics.median(ours), 3),
                "restic_s": round(statistics.median(theirs), 3),
                "pipegrid_cpu_s": round(statistics.median(self.ours_cpu_s[step][1:]), 3),
            }


@contextmanager
def turns_at(rtt_s: float, rng: random.Random) -> Iterator[Turns]:
    """Run ten servers of ours, and rclone, behind links."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = stack.enter_context(Servers(10, rtt_s=rtt_s))
        rclone = stack.enter_context(rclone_at(scratch / "rclone", rtt_s))
        ours = Pipegrid(servers.client, Runner(lambda: 0.0))
        yield Turns(ours, Place("rclone", rclone, scratch / "cache"), scratch, rng)


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Run the command line; returns 1 if a target is not met."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--rtt-ms", type=float, action="append", help="[20 and 100]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument("--files", type=int, default=1000, help="[1000]")
    parser.add_argument("--bytes", type=int, default=46_000_000, help="[46000000]")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    end_on_sigterm()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    compile_package()
    lines = []
    for rtt_ms in options.rtt_ms or sorted(TARGETS):
        with turns_at(rtt_ms / 1000, random.Random(seed)) as turns:
            try:
                for number in range(options.rounds + 1):
                    turns.take(number, options.files, options.bytes)
            except (Failed, CommandFailed) as error:
                print(f"backups: {error}", file=sys.stderr)
                return 1
            for line in turns.report(rtt_ms):
                print(json.dumps({**line, "seed": seed}), file=out, flush=True)
                lines.append(line)
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())

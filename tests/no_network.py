"""Commands in a network namespace that has no network at all; what they try to send is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_RUN = """
import subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
found = 0
with open("/proc/net/snmp") as file:
    names, values = [line.split() for line in file if line.startswith("Ip:")]
    counts = dict(zip(names, values))
    found += int(counts["OutNoRoutes"]) + int(counts["OutRequests"])
with open("/proc/net/snmp6") as file:
    for name, value in (line.split() for line in file):
        found += int(value) if name in ("Ip6OutNoRoutes", "Ip6OutRequests") else 0
print(f"attempts to send: {found}", file=sys.stderr)
sys.exit(status)
"""
_LAST = "attempts to send: "


def unshare() -> list[str]:
    """Return the beginning of a command that runs the rest in a namespace; empty if that is not allowed."""
    start = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    try:
        done = subprocess.run([*start, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return start if done.returncode == 0 else []


def run_without_network(
    *command: str, cwd: Path, env: Mapping[str, str], timeout: float = 120
) -> tuple[int, bytes, str, int]:
    """
    Run a command without any network; sockets of the file system are all that it can reach.

    Returns:
        its status, stdout and stderr, and how many packets it tried to send, or connections and lookups it
        tried to begin.
    """
    done = subprocess.run(
        [*unshare(), sys.executable, "-c", _RUN, *command],
        cwd=cwd,
        env=dict(env),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    err, _, count = done.stderr.decode("utf-8", "replace").rpartition(_LAST)
    return done.returncode, done.stdout, err, int(count)

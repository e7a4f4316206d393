"""
The recorded conversations of a Tahoe-LAFS gateway with its clients, replayed with ours on an embedded grid.

A gateway is a process, so that its storage directories are at hand; one serves all conversations.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from tests import vectors
from tests.gateway.webapi_replay import Replay, delete_shares_below, sequences

START_S = 120.0


@cache
def gateway() -> Path:
    """Return the directory of a gateway that runs until the process ends, with the recorded secret."""
    about = vectors.load("webapi")["about"]
    home = Path(tempfile.mkdtemp(prefix="pg"))
    client = home / "client"
    command = [sys.executable, "-m", "pipegrid.cli", "-d", str(client)]
    subprocess.run(
        [*command, "init", "--local", "--segment-size", str(about["max_immutable_segment_size"])],
        check=True,
        capture_output=True,
    )
    (client / "private/convergence").write_text(about["convergence"] + "\n")
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "gateway", "--port", "tcp:0:interface=127.0.0.1"], stdout=log, stderr=log
        )

    def stop() -> None:
        process.terminate()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)

    atexit.register(stop)
    until_s = time.monotonic() + START_S
    while not (client / "node.url").exists():
        if process.poll() is not None or time.monotonic() > until_s:
            raise AssertionError((home / "log").read_text())
        time.sleep(0.05)
    return client


class WebApiVectorsTests(SynchronousTestCase):
    """Every step that a client needs, or that is sensible; ``quirk`` steps are played and not judged."""

    def play(self, sequence: dict[str, Any]) -> None:
        """Play one conversation."""
        client = gateway()
        token = (client / "private/api_auth_token").read_text().strip()
        url = (client / "node.url").read_text().strip()
        replay = Replay(url, token, f"{time.time_ns():x}", delete_shares_below(client))
        wrong = [str(each) for each in replay.play(sequence) if each.level != "quirk"]
        self.assertEqual(wrong, [], "\n".join(wrong))

    def test_all_are_played(self) -> None:
        """There is a test for each of them."""
        names = {f"test_{each['name'].replace('-', '_')}" for each in sequences()}
        self.assertEqual({name for name in names if not hasattr(self, name)}, set())


def _test_of(sequence: dict[str, Any]) -> Any:
    def test(self: WebApiVectorsTests) -> None:
        self.play(sequence)

    test.__doc__ = sequence["about"]
    return test


for _each in sequences():
    setattr(WebApiVectorsTests, f"test_{_each['name'].replace('-', '_')}", _test_of(_each))

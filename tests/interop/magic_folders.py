"""
Two folders of magic-folder, each with a PipeGrid gateway of its own, synchronise over three servers.

magic-folder has an environment of its own; ``$MAGIC_FOLDER`` says where its command is. Run it with ``make
magic-folder``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from misc.speedtest.peers.nodes import free_port
from twisted.trial.unittest import SynchronousTestCase

from tests.interop import processes
from tests.interop.processes import (
    PipegridGateway,
    Process,
    start_pipegrid_gateway,
    start_pipegrid_server,
    until,
)

MAGIC_FOLDER = os.environ.get(
    "MAGIC_FOLDER", str(Path(__file__).parents[2] / ".venv-magic-folder/bin/magic-folder")
)
SHARES = (2, 3, 3)  # needed, happy, total
INTERVAL_S = "2"
"""Between looks at the folder, and at the grid."""


class MagicFolder(Process):
    """
    A device: a gateway, magic-folder, and one folder.

    Args:
        directory: gets a directory for each of these.
    """

    def __init__(self, directory: Path, gateway: PipegridGateway) -> None:
        self.author = directory.name
        self.folder = directory / "folder"
        self._config = directory / "config"
        self._api_port = free_port()
        self.folder.mkdir(parents=True)
        self.run(
            "init",
            "--listen-endpoint",
            f"tcp:{self._api_port}:interface=127.0.0.1",
            "--node-directory",
            str(gateway.directory),
        )
        super().__init__(directory, MAGIC_FOLDER, "--config", str(self._config), "run")

    def surroundings(self) -> dict[str, str]:
        """Return its environment, in which there is nothing of ours."""
        return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(self, *arguments: str, program: str = MAGIC_FOLDER) -> str:
        """Run a command of it; returns what it prints."""
        done = subprocess.run(
            [program, "--config", str(self._config), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.surroundings(),
            timeout=processes.PATIENCE_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"{arguments}: {done.stdout}{done.stderr}{self.log()[-2000:]}")
        return done.stdout

    def ask(self, *arguments: str) -> str:
        """Run a command of its API; returns what it prints."""
        return self.run(*arguments, program=f"{MAGIC_FOLDER}-api")

    def add(self) -> None:
        """Have the folder synchronised; waits until magic-folder has found the gateway and its servers."""
        until(lambda: "Connected to 3 storage-servers" in self.log(), "its connections", self)
        self.run(
            *("add", "--name", "shared", "--author", self.author),
            *("--poll-interval", INTERVAL_S, "--scan-interval", INTERVAL_S),
            str(self.folder),
        )

    def personal_cap(self) -> str:
        """Return the read cap of what this device has to say."""
        listed = json.loads(self.ask("list-participants", "--folder", "shared"))
        return str(listed[self.author]["personal_dmd"])

    def admit(self, other: MagicFolder) -> None:
        """Take in what another device has to say."""
        self.ask(
            *("add-participant", "--folder", "shared", "--author-name", other.author),
            *("--personal-dmd", other.personal_cap()),
        )


class MagicFolderTests(SynchronousTestCase):
    """Alice and Bob."""

    def setUp(self) -> None:
        self.patch(processes, "PATIENCE_S", 300.0)
        root = Path(self.mktemp()).absolute()
        root.mkdir(parents=True)
        furls = {}
        for number in range(3):
            server, furl = start_pipegrid_server(root / f"server{number}")
            self.addCleanup(server.stop)
            furls[f"server{number}"] = furl
        self.devices = []
        for name in ("alice", "bob"):
            gateway = start_pipegrid_gateway(root / f"{name}-gateway", furls, SHARES)
            self.addCleanup(gateway.stop)
            device = MagicFolder(root / name, gateway)
            self.addCleanup(device.stop)
            device.add()
            self.devices.append(device)

    def test_two_folders(self) -> None:
        """New, changed and deleted files of either get to the other."""
        alice, bob = self.devices
        alice.admit(bob)
        bob.admit(alice)
        (alice.folder / "from alice").write_bytes(b"x" * 100_000)
        (bob.folder / "von Bob: äöü").write_text("small")
        self.arrives(bob, "from alice", b"x" * 100_000)
        self.arrives(alice, "von Bob: äöü", b"small")
        (bob.folder / "from alice").write_bytes(b"changed by Bob")
        self.arrives(alice, "from alice", b"changed by Bob")
        (alice.folder / "sub").mkdir()
        (alice.folder / "sub" / "deep").write_text("deep")
        self.arrives(bob, "sub/deep", b"deep")
        (alice.folder / "von Bob: äöü").unlink()
        self.arrives(bob, "von Bob: äöü", None)

    def arrives(self, device: MagicFolder, name: str, content: bytes | None) -> None:
        """Wait until a file of a folder has this content, or is gone."""
        path = device.folder / name

        def has() -> bool:
            found = path.read_bytes() if path.exists() else None
            return found == content

        until(has, f"{name} at {device.author}", *self.devices)

"""A gateway in a process with accounts for SFTP, and OpenSSH's programs that use it."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from pathlib import Path

from misc.speedtest.peers.nodes import free_port

from pipegrid.core.caps import DirectoryCap, as_cap
from tests.cli.processes import TIMEOUT_S, ProcessTestCase

ASK = "#!/bin/sh\necho $GATEWAY_PASSWORD\n"


class SftpProgramsCase(ProcessTestCase):
    """Has a gateway with the accounts ``bob`` (a key), ``alice`` (a password) and ``reader``."""

    def setUp(self) -> None:
        super().setUp()
        self.port = free_port()
        self.run_command("-d", "c", "init", "--local")
        cap, _ = self.run_command("-d", "c", "mkdir")
        directory = as_cap(cap)
        assert isinstance(directory, DirectoryCap)
        read_cap = directory.readonly()
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / "id")],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        key = (self.home / "id.pub").read_text().strip()
        self.cap = cap
        (self.home / "c/private").mkdir(exist_ok=True, mode=0o700)
        (self.home / "c/private/accounts").write_text(
            f"# accounts\nbob {key} {cap}\n\nalice correct-horse {cap}\nreader {key} {read_cap}\n"
        )
        with (self.home / "c/pipegrid.cfg").open("a") as file:
            file.write(
                f"\n[sftpd]\nenabled = true\nport = tcp:{self.port}:interface=127.0.0.1\n"
                "accounts.file = private/accounts\n"
            )
        self.configure()
        self.gateway = self.start_gateway()

    def configure(self) -> None:
        """Write what OpenSSH's programs are told."""
        (self.home / "ssh.cfg").write_text(
            f"Host *\n HostName 127.0.0.1\n Port {self.port}\n IdentityFile {self.home}/id\n"
            " IdentitiesOnly yes\n StrictHostKeyChecking accept-new\n"
            f" UserKnownHostsFile {self.home}/known\n LogLevel ERROR\n"
        )
        (self.home / "ask").write_text(ASK)
        (self.home / "ask").chmod(0o700)

    def start_gateway(self) -> subprocess.Popen[str]:
        """Start it; returns it when it listens."""
        (self.home / "c/node.url").unlink(missing_ok=True)
        process = self.start(
            "-d", "c", "gateway", "--port", "tcp:0:interface=127.0.0.1", "--log", "gateway.log"
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        until_s = time.monotonic() + TIMEOUT_S
        while not (self.home / "c/node.url").exists() and time.monotonic() < until_s:
            if process.poll() is not None:
                self.fail(process.communicate()[1])
            time.sleep(0.05)
        return process

    def stop_gateway(self) -> str:
        """Stop it in good order; returns its log."""
        self.gateway.send_signal(signal.SIGTERM)
        self.gateway.communicate(timeout=TIMEOUT_S)
        self.assertEqual(self.gateway.returncode, 0)
        return (self.home / "gateway.log").read_text()

    def program(self, *words: str, status: int = 0, password: str | None = None) -> str:
        """Run a program with the configuration; returns what it printed on both outputs."""
        environment = dict(self.environment)
        if password is not None:
            environment |= {
                "SSH_ASKPASS": str(self.home / "ask"),
                "SSH_ASKPASS_REQUIRE": "force",
                "GATEWAY_PASSWORD": password,
            }
        done = subprocess.run(
            words,
            cwd=self.home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
        text = done.stdout.decode("utf-8", "replace")
        self.assertEqual(done.returncode, status, text)
        return text

    def sftp(self, commands: str, user: str = "bob", status: int = 0, *options: str) -> str:
        """Let ``sftp`` do commands, one a line."""
        (self.home / "batch").write_text(commands)
        return self.program(
            "sftp", "-F", "ssh.cfg", *options, "-b", "batch", f"{user}@grid", status=status
        )

    def shell(self, script: str) -> str:
        """Run a script that ends at the first command that fails."""
        return self.program("bash", "-euc", script)

    def quoted(self, path: Path) -> str:
        """Return a path as a shell takes it."""
        return shlex.quote(str(path))

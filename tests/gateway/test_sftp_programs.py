"""OpenSSH's own programs, as users run them, against ``pipegrid gateway``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time

from tests.cli.processes import TIMEOUT_S
from tests.gateway.sftp_programs import SftpProgramsCase


class OpensshTests(SftpProgramsCase):
    """``sftp``, ``scp`` and ``ssh``; each test has a gateway of its own, so there are few."""

    def test_sftp_and_scp(self) -> None:
        """Files, trees and directories go there and back; the server's key is the one that was made."""
        data = os.urandom(3_000_000)
        (self.home / "big").write_bytes(data)
        (self.home / "tree/a/b").mkdir(parents=True)
        for number in range(20):
            (self.home / f"tree/a/b/{number}").write_bytes(os.urandom(number * 10))
        out = self.sftp(
            "put big\nmkdir d\nput -r tree\nrename big d/large\nls -l d\n"
            "get d/large back\ndf\nchmod 600 d/large\nls -l d\nls -l tree/a/b\n"
        )
        self.assertRegex(out, r"-rw-r--r-- .* 3000000 .* (d/)?large")
        self.assertRegex(out, r"-rw------- .* 3000000 .* (d/)?large")
        self.assertEqual((self.home / "back").read_bytes(), data)
        scp = ("scp", "-q", "-F", "ssh.cfg")
        self.program(*scp, "-r", "bob@grid:tree", "tree2")
        self.program("diff", "-r", "tree", "tree2")
        self.program(*scp, "-p", "big", "bob@grid:copy")
        self.program(*scp, "alice@grid:copy", "copy2", password="correct-horse")
        self.program("cmp", "big", "copy2")
        self.assertIn("no shell", self.program(*scp, "-O", "big", "bob@grid:x", status=1))
        self.assertIn("no shell", self.program("ssh", "-F", "ssh.cfg", "bob@grid", "ls", status=1))
        self.assertIn("no shell", self.program("ssh", "-F", "ssh.cfg", "bob@grid", status=1))
        public = (self.home / "c/private/ssh_host_ed25519_key.pub").read_text().split()
        self.assertIn(public[1], (self.home / "known").read_text())
        private = self.home / "c/private/ssh_host_ed25519_key"
        self.assertEqual(private.stat().st_mode & 0o777, 0o600)
        ls, _ = self.run_command("-d", "c", "ls", f"{self.cap}/tree/a/b")
        self.assertEqual(len(ls.splitlines()), 20)
        log = self.stop_gateway()
        for line in log.splitlines():
            json.loads(line)
        for secret in ("URI:", "correct-horse", "Traceback"):
            self.assertNotIn(secret, log)
        self.assertEqual(list((self.home / "c/tmp").iterdir()), [])

    def test_logins(self) -> None:
        """Wrong names, passwords and keys are refused; an account that reads cannot write."""
        for user, password in (("alice", "wrong"), ("nobody", "correct-horse"), ("bob", "x")):
            self.program(
                *("sftp", "-F", "ssh.cfg", "-o", "PubkeyAuthentication=no"),
                *("-o", "NumberOfPasswordPrompts=1", f"{user}@grid"),
                password=password,
                status=255,
            )
        self.program(
            *("ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", "other"),
        )
        sftp = ("sftp", "-F", "ssh.cfg", "-o", "BatchMode=yes", "-i", "other")
        (self.home / "id").rename(self.home / "id.away")
        self.program(*sftp, "bob@grid", status=255)
        # The accounts are read again: keys of other kinds, and a password that is gone.
        self.program("ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", "third")
        with (self.home / "c/private/accounts").open("a") as file:
            for name in ("other", "third"):
                key = (self.home / f"{name}.pub").read_text().strip()
                file.write(f"bob {key} {self.cap}\n")
        self.sftp("put ssh.cfg", "bob", 0, "-i", "other")
        self.sftp("ls", "bob", 0, "-i", "third")
        (self.home / "id.away").rename(self.home / "id")
        out = self.sftp("put ssh.cfg other.cfg", "reader", 1)
        self.assertIn("Permission denied", out)
        self.assertIn("ssh.cfg", self.sftp("ls", "reader"))

    def test_wrong_keys(self) -> None:
        """Clients that offer many wrong keys are disconnected; others log in meanwhile."""
        self.shell("for n in $(seq 25); do ssh-keygen -q -t ed25519 -N '' -f wrong$n; done")
        offered = [word for n in range(1, 26) for word in ("-i", f"wrong{n}")]
        words = ["ssh", "-F", "none.cfg", *offered, "-o", "BatchMode=yes", "bob@grid"]
        config = (self.home / "ssh.cfg").read_text()
        (self.home / "none.cfg").write_text(config.replace(f" IdentityFile {self.home}/id\n", ""))
        self.sftp("ls")  # the server's key is known
        floods = [
            subprocess.Popen(
                words,
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(6)
        ]
        self.sftp("put ssh.cfg\nls")
        for flood in floods:
            _, err = flood.communicate(timeout=TIMEOUT_S)
            self.assertEqual(flood.returncode, 255, err)

    def test_killed_in_mid_upload(self) -> None:
        """No half file; the gateway works on, and also after it was killed itself."""
        (self.home / "big").write_bytes(os.urandom(30_000_000))
        scp = ["scp", "-q", "-l", "40000", "-F", "ssh.cfg", "big", "bob@grid:big"]
        for kill_gateway in (False, True):
            with subprocess.Popen(scp, cwd=self.home, env=self.environment) as running:
                time.sleep(2.5)
                self.assertIsNone(running.poll())
                (self.gateway if kill_gateway else running).kill()
                running.kill()
            if kill_gateway:
                self.gateway.wait()
                self.gateway = self.start_gateway()
            self.assertNotIn("big", self.sftp("ls").replace("ls", ""))
        self.sftp("put ssh.cfg\nls")
        self.assertIn("ssh.cfg", self.sftp("ls"))

    def test_bytes_without_a_login(self) -> None:
        """A thousand idle connections and bytes that make no sense affect no one who has an account."""
        idle = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(1000)]
        for number in range(40):
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                start = (b"", b"SSH-2.0-x\r\n", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n\0")
                connection.sendall(start[number % 4] + os.urandom(200) * (number % 7))
        huge = socket.create_connection(("127.0.0.1", self.port))
        huge.sendall(b"SSH-2.0-x\r\n" + (1_000_000).to_bytes(4, "big") + bytes(60_000))
        huge.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while huge.recv(65536):  # until it is disconnected
                pass
        self.sftp("put ssh.cfg\nls")
        for each in (*idle, huge):
            each.close()
        self.assertNotIn("Traceback", self.stop_gateway())

"""A private Tor network on this machine: authorities that are relays, and one client (Debian's ``tor``)."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from misc.speedtest.peers.nodes import free_port

AUTHORITIES = 4
START_S = 240.0

_COMMON = """
TestingTorNetwork 1
PathsNeededToBuildCircuits 0.67
TestingDirAuthVoteExit *
TestingDirAuthVoteHSDir *
TestingDirAuthVoteGuard *
V3AuthNIntervalsValid 2
AssumeReachable 1
Sandbox 0
RunAsDaemon 0
ShutdownWaitLength 0
DisableDebuggerAttachment 0
ProtocolWarnings 1
SafeLogging 0
Log notice file {place}/notice.log
DataDirectory {place}
"""
_RELAY = """
Nickname {name}
Address 127.0.0.1
OrPort 127.0.0.1:{or_port}
DirPort 127.0.0.1:{dir_port}
SocksPort 0
ExitRelay 1
ExitPolicyRejectPrivate 0
ExitPolicy accept 127.0.0.0/8:*
ExitPolicy accept *:*
AuthoritativeDirectory 1
V3AuthoritativeDirectory 1
ContactInfo tests@localhost
TestingV3AuthInitialVotingInterval 20
TestingV3AuthInitialVoteDelay 4
TestingV3AuthInitialDistDelay 4
V3AuthVotingInterval 20
V3AuthVoteDelay 4
V3AuthDistDelay 4
"""
_CLIENT = """
SocksPort 127.0.0.1:{socks_port}
SocksPort unix:{place}/socks
ControlPort 127.0.0.1:{control_port}
CookieAuthentication 1
"""
_ONLY_CLIENT = """
ClientRejectInternalAddresses 0
UseEntryGuards 0
"""


def is_installed() -> bool:
    """Return whether the programs are there."""
    return all(shutil.which(name) for name in ("tor", "tor-gencert"))


class TorNetwork:
    """
    A network that is started, waited for, and stopped.

    Attributes:
        socks_port, control_port: of its client.
        socks_path: the client's SOCKS port in the file system.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.socks_port, self.control_port = free_port(), free_port()
        self.socks_path = self._directory / "client/socks"

    def start(self) -> None:
        """Start all, and wait until the client can make circuits."""
        lines, relays = [], []
        for number in range(AUTHORITIES):
            place = self._directory / f"auth{number}"
            (place / "keys").mkdir(parents=True, mode=0o700)
            place.chmod(0o700)
            ports = {"or_port": free_port(), "dir_port": free_port()}
            text = (_COMMON + _RELAY).format(place=place, name=f"auth{number}", **ports)
            identity = self._identity(place, f"127.0.0.1:{ports['dir_port']}")
            fingerprint = self._fingerprint(place, text)
            lines.append(
                f"DirAuthority auth{number} orport={ports['or_port']} no-v2 v3ident={identity} "
                f"127.0.0.1:{ports['dir_port']} {fingerprint}"
            )
            relays.append((place, text))
        self._lines = lines
        client = self._directory / "client"
        client.mkdir(mode=0o700)
        text = (_COMMON + _CLIENT + _ONLY_CLIENT).format(
            place=client, socks_port=self.socks_port, control_port=self.control_port
        )
        for place, settings in [*relays, (client, text)]:
            torrc = place / "torrc"
            torrc.write_text(settings + "\n".join(lines) + "\n")
            self._processes.append(
                subprocess.Popen(
                    ["tor", "--defaults-torrc", "/dev/null", "-f", str(torrc), "--quiet"],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        self._wait(client / "notice.log")

    def program(self, path: Path) -> str:
        """Write a program that is ``tor`` as a client of this network; returns its name."""
        torrc = path.with_suffix(".torrc")
        place = path.with_suffix(".log")
        place.mkdir(mode=0o700)
        settings = _COMMON.format(place=place) + _ONLY_CLIENT
        torrc.write_text(settings + "\n".join(self._lines) + "\n")
        # The first four arguments say that there are no other settings.
        path.write_text(
            '#!/bin/sh\ntor "$@" --verify-config --quiet || exit 1\n'
            f'shift 4\nexec tor --defaults-torrc /dev/null -f {torrc} "$@"\n'
        )
        path.chmod(0o755)
        return str(path)

    def stop(self) -> None:
        """Stop all."""
        for each in self._processes:
            each.terminate()
        for each in self._processes:
            with suppress(subprocess.TimeoutExpired):
                each.wait(20)
            if each.poll() is None:
                each.kill()
                each.wait()

    def _identity(self, place: Path, address: str) -> str:
        keys = place / "keys"
        subprocess.run(
            [
                *("tor-gencert", "--create-identity-key", "--passphrase-fd", "0", "-m", "12"),
                *("-a", address, "-i", str(keys / "authority_identity_key")),
                *("-s", str(keys / "authority_signing_key")),
                *("-c", str(keys / "authority_certificate")),
            ],
            input=b"secret\n",
            check=True,
            capture_output=True,
        )
        text = (keys / "authority_certificate").read_text()
        found = re.search(r"^fingerprint ([0-9A-F]{40})$", text, re.M)
        assert found is not None, text
        return found[1]

    def _fingerprint(self, place: Path, settings: str) -> str:
        torrc = place / "torrc"
        # Without another authority Tor does not list the fingerprint of one.
        other = "DirAuthority other orport=1 no-v2 v3ident=" + "F" * 40 + " 127.0.0.1:2 " + "F" * 40
        torrc.write_text(settings + other + "\n")
        done = subprocess.run(
            ["tor", "--defaults-torrc", "/dev/null", "-f", str(torrc), "--list-fingerprint"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return "".join(done.stdout.strip().splitlines()[-1].split(" ")[1:])

    def _wait(self, log: Path) -> None:
        until_s = time.monotonic() + START_S
        while not (log.exists() and "Bootstrapped 100%" in log.read_text()):
            if time.monotonic() > until_s:
                raise AssertionError(log.read_text()[-2000:])
            time.sleep(0.5)

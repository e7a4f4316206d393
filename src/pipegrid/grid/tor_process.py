"""
Runs Tor for this program: starts it at the first use, with a data directory that no other program uses, and
ends it with the program.

Tor ends when the connection to its control port does, even if this program is killed. Each of several
programs that run at the same time has its own Tor and its own data directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

from pipegrid.disk.private_files import make_directory
from pipegrid.disk.safe_open import open_locked, read_file
from pipegrid.errors import UsageError
from pipegrid.reactor.connection_policy import ProxyAddress, parse_proxy_address
from pipegrid.reactor.process_settings import TOR_START
from pipegrid.reactor.tcp_socks5_endpoints import ProxyError
from pipegrid.reactor.tor_control_port import CONTROL_S, connect_control, listeners_in, reason_of

START_S = 180.0
"""The time limit for the start of Tor, which fetches a directory of relays the first time."""

AGAIN_S = 10.0
"""How long after a failed start no new start is attempted; the error is repeated."""

MAX_DIRECTORIES = 8
"""Maximum number of programs that each run a Tor at the same time in one client's directory."""

USUAL_NAMES = ("tor", "/usr/sbin/tor", "/usr/bin/tor")
DIRECTORY_NAME = "tor"

_LOOK_S = 0.25
_MAX_FILE_BYTES = 4096
_PROGRESS = re.compile(r"PROGRESS=(\d{1,3})\b")
_SUMMARY = re.compile(r'SUMMARY="([^"]{0,100})"')


class LaunchedTor:
    """
    Starts one Tor for all callers, and starts it again if it has ended.

    Args:
        directory: the parent of the data directories, one for each running Tor.
        executable: the Tor program; empty: ``tor`` in the search path or a usual place.
    """

    def __init__(self, directory: Path, executable: str = "") -> None:
        self._directory = directory
        self._executable = executable
        self._process: subprocess.Popen[bytes] | None = None
        self._protocol: Any = None
        self._control: ProxyAddress | None = None
        self._socks: tuple[ProxyAddress, ...] = ()
        self._waiting: list[Deferred[None]] | None = None
        self._failure: BaseException | None = None
        self._failed_s = float("-inf")
        self._shown = ""

    async def socks_addresses(self, reactor: Any) -> tuple[ProxyAddress, ...]:
        """
        Return the addresses of Tor's SOCKS ports; starts Tor if it does not run.

        Raises:
            UsageError: Tor is not installed, or its files cannot be written.
            ProxyError: Tor does not start.
        """
        await self._started(reactor)
        return self._socks

    async def control_addresses(self, reactor: Any) -> tuple[ProxyAddress, ...]:
        """Return the address of Tor's control port; starts Tor and raises errors like ``socks_addresses``."""
        await self._started(reactor)
        return () if self._control is None else (self._control,)

    def stop(self) -> None:
        """End Tor at once; the next connection starts another one."""
        self._socks, self._control = (), None
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.transport.abortConnection()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def _started(self, reactor: Any) -> None:
        if self._socks:
            return
        if self._failure is not None and reactor.seconds() - self._failed_s < AGAIN_S:
            raise self._failure
        done: Deferred[None] = Deferred()
        if self._waiting is not None:
            self._waiting.append(done)
        else:
            self._waiting = [done]
            Deferred.fromCoroutine(self._start(reactor)).addBoth(self._ended, reactor)
        await done

    def _ended(self, result: Any, reactor: Any) -> None:
        waiting, self._waiting = self._waiting or [], None
        self._failure = getattr(result, "value", None)
        if self._failure is not None:
            self._failed_s = reactor.seconds()
            self.stop()
        for each in waiting:
            if not each.called:
                each.callback(result)

    async def _start(self, reactor: Any) -> None:
        until_s = reactor.seconds() + START_S
        self.stop()  # end a Tor whose control connection was lost
        program = self._program()
        place, lock = self._claim()
        try:
            self._process = _run(program, place, lock)
        except OSError as error:
            text = f"cannot start {program}: {error.strerror}; set [tor] tor.executable"
            if error.filename != program:  # another file: the disk may be full
                text = (
                    f"cannot write what Tor needs in {place}: {error.strerror}; make that possible"
                )
            raise UsageError(text) from None
        finally:
            os.close(lock)  # Tor inherits the lock and holds it until it ends
        self._control = await self._control_port(reactor, place, until_s)
        self._protocol = protocol = await connect_control(reactor, self._control)
        protocol.when_disconnected().addBoth(self._lost, protocol)
        await _ask(reactor, protocol.queue_command("TAKEOWNERSHIP"))
        await self._bootstrapped(reactor, protocol, until_s)
        answer = await _ask(reactor, protocol.get_info("net/listeners/socks"))
        self._socks = listeners_in(str(answer.get("net/listeners/socks", "")))
        if not self._socks:
            raise ProxyError(f"{program} has opened no SOCKS port")

    def _lost(self, _: object, protocol: Any) -> None:
        if self._protocol is protocol:
            self._socks = ()  # so the next connection starts Tor again

    def _program(self) -> str:
        names = (self._executable,) if self._executable else USUAL_NAMES
        for name in names:
            found = shutil.which(name)
            if found is not None:
                return found
        what = f"there is no program {names[0]!r}" if self._executable else "Tor is not installed"
        raise UsageError(
            f"[tor] launch is true, and {what}; install it (Debian: apt install tor), or set [tor] "
            "tor.executable"
        )

    def _claim(self) -> tuple[Path, int]:
        """Return a data directory that no running Tor uses, and the file descriptor of its lock."""
        for number in range(1, MAX_DIRECTORIES + 1):
            place = self._directory / f"{DIRECTORY_NAME}-{number}"
            try:
                make_directory(place, 0o700)
                lock = open_locked(str(place / "pipegrid.lock"), os.O_RDWR | os.O_CREAT, mode=0o600)
            except OSError as error:
                raise UsageError(
                    f"cannot use {place} for Tor: {error.strerror}; make it writable"
                ) from error
            if lock is not None:
                return place, lock
        raise ProxyError(
            f"{MAX_DIRECTORIES} programs have a Tor in {self._directory} already; end one of them"
        )

    async def _control_port(self, reactor: Any, place: Path, until_s: float) -> ProxyAddress:
        while reactor.seconds() < until_s:
            self._check_running(place)
            try:
                text = read_file(place / "control-port", _MAX_FILE_BYTES).decode("ascii", "replace")
                return parse_proxy_address(text.strip().removeprefix("PORT="))
            except (FileNotFoundError, ValueError):  # missing or incomplete
                await deferLater(reactor, _LOOK_S)
        raise ProxyError(f"Tor did not open its control port within {START_S:.0f} s")

    async def _bootstrapped(self, reactor: Any, protocol: Any, until_s: float) -> None:
        while True:
            answer = await _ask(reactor, protocol.get_info("status/bootstrap-phase"))
            phase = str(answer.get("status/bootstrap-phase", ""))
            found = _PROGRESS.search(phase)
            percent = int(found[1]) if found is not None else 0
            summary = _SUMMARY.search(phase)
            shown = f"Tor is starting: {percent} %" + (f", {summary[1]}" if summary else "")
            if percent >= 100:
                return
            if shown != self._shown and TOR_START.tell is not None:
                TOR_START.tell(shown)
            self._shown = shown
            if reactor.seconds() > until_s:
                raise ProxyError(
                    f"Tor did not start within {START_S:.0f} s ({percent} %); is there a network?"
                )
            await deferLater(reactor, _LOOK_S)

    def _check_running(self, place: Path) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            return
        try:
            lines = read_file(place / "tor.log", 1 << 16).decode("utf-8", "replace").splitlines()
        except OSError:
            lines = []
        said = [line for line in lines if "[err]" in line or "[warn]" in line]
        why = said[0].partition("] ")[2] if said else f"status {self._process.returncode}"
        raise ProxyError(f"Tor has ended at its start: {why[:200]}")


async def _ask(reactor: Any, asked: Deferred[Any]) -> Any:
    try:
        return await asked.addTimeout(CONTROL_S, reactor)
    except CancelledError:
        raise
    except Exception as error:
        raise ProxyError(f"Tor was started, and does not answer ({reason_of(error)})") from None


def _run(program: str, place: Path, lock: int) -> subprocess.Popen[bytes]:
    """
    Start Tor, which inherits the lock of its data directory; its output goes to a file in the directory.
    """
    control, empty = place / "control-port", place / "torrc"
    control.unlink(missing_ok=True)
    empty.write_bytes(b"")  # Tor does not accept /dev/null
    settings = {
        "DataDirectory": str(place),
        "SocksPort": "auto",
        "ControlPort": "auto",
        "ControlPortWriteToFile": str(control),
        "CookieAuthentication": "1",
        "__OwningControllerProcess": str(os.getpid()),
        "Log": "err stdout",
    }
    arguments = [program, "--defaults-torrc", str(empty), "-f", str(empty)]
    for name, value in settings.items():
        arguments += [f"--{name}", value]
    with open(place / "tor.log", "wb") as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            start_new_session=True,  # keeps Ctrl-C from Tor; this program ends Tor
        )

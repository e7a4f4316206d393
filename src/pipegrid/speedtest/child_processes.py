"""
Child processes of the speed test: responders, proxies, and storage servers, with an emulated link if
required.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

import pipegrid
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import PipegridError
from pipegrid.grid.client_creation import create_client
from pipegrid.grid.client_paths import SERVERS_NAME
from pipegrid.reactor.deferreds import as_deferred
from pipegrid.reactor.process_settings import tune_gc
from pipegrid.wire import server_address
from pipegrid.wire.announcements import FURL, NURLS
from pipegrid.wire.server_address import Furl, Nurl

# Each process first prints one line of JSON, and ends when its standard input ends, so that no process
# outlives its parent, even if the parent is killed. ``Popen`` and the reactor's threads are used, since
# Twisted's own process support needs a signal handler that the command line does not install.

_JOB = "PIPEGRID_SPEEDTEST_JOB"

CHILD_START_S = 120.0
"""The time limit for the start of a process: on a busy machine ten processes start slowly."""
CHILD_STOP_S = 10.0


class ChildError(PipegridError):
    """A process that the speed test needs did not start; its output says why."""


class ChildProcess:
    """
    A running process.

    Attributes:
        said: the parsed JSON of its first line.
    """

    def __init__(self, reactor: Any, process: subprocess.Popen[str]) -> None:
        self._reactor = reactor
        self._process = process
        self.said: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @as_deferred
    async def stop(self) -> None:
        """Stop the process; fires when it has ended."""
        # If this process is killed meanwhile, the child's input ends, and so the child ends, too.
        self._process.terminate()
        await in_thread(self._reactor, reap, self._process, CHILD_STOP_S)


@as_deferred
async def start_child(reactor: Any, module: str, job: Any) -> ChildProcess:
    """
    Start ``python -m module``; fires after its first line. Cancelling stops the process.

    Args:
        job: input for the process, as JSON in its environment, which other users of the machine cannot read.

    Fails with ChildError: the process ended, printed something else, or printed nothing within
    ``CHILD_START_S``.
    """
    command = [sys.executable, "-m", module]
    process = _popen(command, {**environment(), _JOB: json.dumps(job)})
    child = ChildProcess(reactor, process)
    assert process.stdout is not None
    # Killing the process ends the read, so no thread is left.
    limit = reactor.callLater(CHILD_START_S, process.kill)
    try:
        line = await in_thread(reactor, process.stdout.readline)
        child.said = json.loads(line)
    except ValueError:
        await child.stop()
        raise ChildError(
            f"the process {module} did not start (status {process.returncode}); see what it printed"
        ) from None
    except BaseException:
        process.kill()
        await child.stop()
        raise
    finally:
        if limit.active():
            limit.cancel()
    return child


def in_thread(reactor: Any, work: Callable[..., Any], *arguments: Any) -> Deferred[Any]:
    """Call a function that may block, in a thread of the reactor's pool."""
    return deferToThreadPool(reactor, reactor.getThreadPool(), work, *arguments)


def reap(process: subprocess.Popen[str], within_s: float) -> None:
    """Wait until a stopped process has ended; kill it after ``within_s``."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()  # some programs end when their input ends
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _popen(command: Sequence[str], surroundings: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process with pipes for its input and its output."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=surroundings)


def environment() -> dict[str, str]:
    """Return an environment in which Python finds this copy of the package, installed or not."""
    source = str(Path(pipegrid.__file__).resolve().parent.parent)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


# Functions for the child process.


def be_child(start: Callable[[Any, Any], Any]) -> None:
    """
    Run a reactor until standard input ends.

    Args:
        start: gets the reactor and the job, starts the work, and returns the value to print as one line of
            JSON.
    """
    from twisted.internet import reactor as installed_reactor

    reactor: Any = installed_reactor
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the parent gets Ctrl-C, too, and stops this process
    said = start(reactor, json.loads(os.environ[_JOB]))
    tune_gc()
    _run_until_input_ends(reactor, said)


def _run_until_input_ends(reactor: Any, said: Any) -> None:
    """Print the first line, and run the reactor until standard input ends."""
    print(json.dumps(said), flush=True)
    reactor.callInThread(lambda: (sys.stdin.read(), reactor.callFromThread(reactor.stop)))
    reactor.run(installSignalHandlers=False)  # SIGTERM's default action is enough


# The relay (``pipegrid.testing.link_relay``) runs in a separate process, so that it does not use the CPU time
# of client or servers:
#
#     python -m pipegrid.speedtest.child_processes --relay RTT_S HOST:PORT...
#
# prints a JSON list of ports, one for each target and a last one for an echo, and runs until its standard
# input ends.

LOOPBACK = "127.0.0.1"
START_S = 60.0
STOP_S = 15.0
_TICKS = os.sysconf("SC_CLK_TCK")

A = TypeVar("A")


@attrs.frozen
class FileEncoding:
    """
    How a client encodes files.

    Attributes:
        params: k, n and the segment size.
        happy: over how many servers the shares of a file must be spread.
    """

    params: Params
    happy: int

    @classmethod
    def for_servers(cls, count: int, params: Params | None = None) -> FileEncoding:
        """
        Return ``params``, or the usual 3 of 10, with a happiness of 7, or less for fewer servers or shares.
        """
        params = params or Params()
        return cls(params, min(7, count, params.total_shares))


class Servers:
    """
    Real storage servers, ``pipegrid serve`` processes on loopback, as a context manager; also makes a
    client's directory that names them, and a relay that adds a round trip if required. Starting and stopping
    block.

        with Servers(10, rtt_s=0.1) as servers:
            grid = await Grid.open(reactor, servers.client)

    Args:
        count: how many servers.
        rtt_s: round-trip time of the link to them; None for no relay.
        durability: the durability policy of the servers.
        scratch: where directories are created; None for the usual directory of temporary files. The speed of
            its disk affects results.
        encoding: of the client's directory; None for ``FileEncoding.for_servers(count)``.
        yielding: the niceness of the servers (0 to 19). In a real grid each server has its own CPU; ten
            servers on this machine would leave the client only a tenth of one.

    Attributes:
        encoding: the encoding in the client's directory.
        client: the client's directory.
        addresses: the servers' addresses for the client.
        furls: their Foolscap addresses, without the relay.
        directories: the servers' directories.
        processes: the servers' processes.
        echo_port: a port of the relay that echoes its input over the same link; None without a relay.
    """

    def __init__(
        self,
        count: int = 10,
        *,
        rtt_s: float | None = None,
        durability: str = "batch",
        scratch: Path | None = None,
        encoding: FileEncoding | None = None,
        profile: Path | None = None,
        yielding: int = 0,
    ) -> None:
        self._count = count
        self._rtt_s = rtt_s
        self._durability = durability
        self._scratch = scratch
        self.encoding = encoding or FileEncoding.for_servers(count)
        self._profile = profile
        self._yielding = yielding
        self._stack = contextlib.ExitStack()
        self.processes: list[subprocess.Popen[str]] = []
        self.addresses: list[Nurl] = []
        self.furls: list[Furl] = []
        self.directories: list[Path] = []
        self.echo_port: int | None = None
        self.client = Path()

    def __enter__(self) -> Servers:
        with self._stack:
            scratch = self._stack.enter_context(tempfile.TemporaryDirectory(dir=self._scratch))
            spread_out(scratch)
            self._start(Path(scratch))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:  # stop all at the same time: each takes a moment
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        self._stack.close()

    def cpu_s(self) -> float:
        """Return the CPU time that all servers together have used so far."""
        return sum(cpu_s(process.pid) for process in self.processes)

    def peak_bytes(self) -> int:
        """Return the peak memory of the server that has used most."""
        return max(peak_bytes(process.pid) for process in self.processes)

    def _start(self, scratch: Path) -> None:
        # ext4 chooses a directory's place on the disk by its name, so the name differs in each run.
        self.directories = [
            scratch / f"{scratch.name}-{server_name(number)}" for number in range(self._count)
        ]
        for directory in self.directories:
            self.processes.append(self._stack.enter_context(running(self._command(directory))))
        for process in self.processes:
            self.addresses.append(server_address.parse_nurl(first_line(process)))
            self.furls.append(server_address.parse_furl(first_line(process)))
        if self._rtt_s is not None:
            targets = [f"{address.host}:{address.port}" for address in self.addresses]
            program = ["-m", "pipegrid.speedtest.child_processes"]
            command = [sys.executable, *program, "--relay", str(self._rtt_s), *targets]
            relay = self._stack.enter_context(running(command))
            *ports, self.echo_port = json.loads(first_line(relay))
            self.addresses = at_ports(self.addresses, ports)
        self.client = scratch / "client"
        make_client(self.client, self.addresses, self.encoding.params, self.encoding.happy)

    def _command(self, directory: Path) -> list[str]:
        python = [sys.executable]
        if self._yielding:
            python = ["nice", "-n", str(self._yielding), *python]
        if self._profile is not None:
            python += ["-m", "cProfile", "-o", str(self._profile / directory.name)]
        arguments = ["--port", f"tcp:0:interface={LOOPBACK}", "--durability", self._durability]
        # The servers end with this process, even if this process is killed.
        program = ["-m", "pipegrid.speedtest.end_with_parent", "pipegrid.cli"]
        return [*python, *program, "-q", "-d", str(directory), "serve", *arguments]


def spread_out(directory: str) -> None:
    """
    Make the file system spread the entries of a directory over the disk, if it can (ext4).

    So each server gets a different part of the disk, and rarely a part in which an earlier run has just
    removed files. ext4 without a journal does not reuse an inode for five minutes after its removal, and
    skips all such inodes in each search: puts of small files took three times as long in a second run.
    """
    with contextlib.suppress(OSError):
        subprocess.run(["chattr", "+T", directory], stderr=subprocess.DEVNULL, timeout=START_S)


@contextlib.contextmanager
def running(
    command: Sequence[str], surroundings: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """
    Run a process within this context; afterwards stop it, and kill it if necessary.

    Args:
        surroundings: its environment; None for one in which it finds this copy of the package.
    """
    process = _popen(command, environment() if surroundings is None else surroundings)
    try:
        yield process
    finally:
        process.terminate()
        reap(process, STOP_S)


def first_line(process: subprocess.Popen[str]) -> str:
    """
    Return the first line of a process, which it prints when it is ready.

    Raises:
        RuntimeError: the process ended without a line.
    """
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with status {process.wait()} before it began")
    return line


def make_client(
    directory: Path, addresses: Sequence[Nurl | Furl], params: Params, happy: int
) -> None:
    """Create a client's directory that lists servers, each with the protocol of its address."""
    names = {}
    for number, address in enumerate(addresses):
        name, text = server_name(number), str(address)
        known = {NURLS: [text]} if isinstance(address, Nurl) else {FURL: text}
        names[f"v0-{name}"] = {"ann": {"nickname": name, **known}}
    path = directory / SERVERS_NAME
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"storage": names}), "utf-8")  # JSON is YAML
    create_client(directory, params=params, happy=happy)


def at_ports(places: Sequence[A], ports: Sequence[int]) -> list[A]:
    """Return the same addresses, with the ports of a relay on this machine."""
    pairs = zip(places, ports, strict=True)
    evolve: Any = attrs.evolve
    return [evolve(place, host=LOOPBACK, port=port) for place, port in pairs]


def server_name(number: int) -> str:
    """Return the name of the server with this number."""
    return f"server{number:02}"


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM; is it running?")


def ping_s(port: int, count: int) -> list[float]:
    """Send ``count`` single bytes to the echo, one after the other; return the round-trip time of each."""
    times = []
    with socket.create_connection((LOOPBACK, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"!")
        connection.recv(1)  # the first byte also waits for the link's handshake
        for _ in range(count):
            began = time.perf_counter()
            connection.sendall(b"!")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    return times


# The process of the relay.


def relay(rtt_s: float, targets: Sequence[str]) -> None:
    """Relay connections to each target, and to an echo, until standard input ends."""
    from twisted.internet import reactor as installed_reactor
    from twisted.internet.endpoints import TCP4ClientEndpoint
    from twisted.internet.protocol import Factory
    from twisted.protocols.wire import Echo

    from pipegrid.testing.link_relay import LinkShape, RelayFactory, SharedLink

    reactor: Any = installed_reactor
    link = SharedLink(reactor, LinkShape(rtt_s))
    echo = reactor.listenTCP(0, Factory.forProtocol(Echo), interface=LOOPBACK)
    ports = []
    for target in [*targets, f"{LOOPBACK}:{echo.getHost().port}"]:
        host, _, port = target.rpartition(":")
        factory = RelayFactory(link, TCP4ClientEndpoint(reactor, host, int(port)))
        listening = reactor.listenTCP(0, factory, interface=LOOPBACK)
        ports.append(listening.getHost().port)
    _run_until_input_ends(reactor, ports)


def main() -> None:
    """
    Run the relay to the servers in this process; the arguments are ``--relay``, the round-trip time and the
    targets.
    """
    parser = argparse.ArgumentParser(description="The link in front of a speed test's servers.")
    parser.add_argument("--relay", type=float, metavar="RTT_S", required=True)
    parser.add_argument("targets", nargs="+", metavar="HOST:PORT")
    options = parser.parse_args()
    relay(options.relay, options.targets)


if __name__ == "__main__":
    main()

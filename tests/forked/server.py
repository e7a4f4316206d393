"""
Forks a process for every command that tests ask for, so that none of them begins an interpreter and imports.

A command of a small file spends nearly all of its time on these. Here one process, begun by
``tests.forked.client``, has imported what commands do, and forks; the child takes on what it is asked to
(arguments, environment, directory, umask, standard streams) and then does what ``python -m MODULE`` does.
So it is a process like any other, with a number, signals and a status of its own.

What it has before it begins is what a fresh one has, and a test holds them to each other: no thread, no open
file, no reactor, no signal's handler. What differs:

- All children of one server have the same seed of ``hash``, and this process for their parent.
- ``/proc`` shows the server's command line, and as a peak of memory what the server had.
- Modules are there already: what is missing among the imports, or imported in the wrong order, does not show.

So tests whose subject is one of these begin fresh processes, and so does a scenario of every kind of command.
What an interpreter reads when it begins cannot be asked for: the server's environment has to say the same.

Begun with a program behind the socket, it is a server for that instead, which has an interpreter and
libraries of its own: ``around`` begins it so for Tahoe-LAFS. Then it has imported what the program stands on,
of the program itself nothing, and a child runs that from its first line on. Some of these libraries make a
reactor when they are imported, so each child makes it anew.

A connection is one command: its request, then the child's number and later its status, a line each. A byte
that comes meanwhile is a signal to send; a connection that ends takes the child with it. The server ends when
its standard input does, which is when whoever began it is gone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import cast

ALREADY = ("LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "TZ")
"""With these begin the names of what is read from the environment before a program is."""

ROOMS = ("cli", "core", "disk", "flow", "grid", "storage", "transfer", "transport", "tree")
"""Of the package: what commands of files and directories import, sooner or later."""

NOT = (
    *(
        "cli.__main__",
        "cli.backup_monitoring",
        "cli.cmd_backup",
        "cli.cmd_gateway",
        "cli.cmd_invite",
        "cli.cmd_join",
        "cli.cmd_mirror",
        "cli.cmd_introducer",
        "cli.cmd_serve",
        "cli.cmd_speedtest",
        "cli.completion",
        "cli.serve_record",
    ),
    *(
        "cli.mirror",
        "cli.speedtest",
        "cli.twist_gateway",
        "cli.twist_storage_server",
        "grid.introducer_discovery",
        "grid.introducer_client",
        "grid.introducer_settings",
    ),
    *(
        "grid.invite_and_join",
        "grid.serve_settings",
        "grid.wormhole_exchange",
        "transfer.put.async_source",
        "transport.foolscap",
        "transport.status_ping",
    ),
)
"""With these begin the names of modules that are for others, or bring Foolscap, which makes a reactor."""

OTHERS = (
    "cryptography.hazmat.primitives.asymmetric.rsa",
    "pipegrid.reactor.tcp_transport",
    "sqlite3",
    "twisted.internet.default",
    "zfec",
)
"""Modules that they import when they are used."""

BENEATH = (
    *("autobahn.twisted.websocket", "bcrypt", "cbor2", "collections_extended"),
    *("cryptography.fernet", "cryptography.x509", "eliot.logwriter", "eliot.testing"),
    *("eliot.twisted", "filelock", "foolscap.api", "foolscap.logging.cli"),
    *("foolscap.logging.publish", "future.builtins", "klein", "nacl.hash", "nacl.public"),
    *("netifaces", "orjson", "past.builtins", "psutil", "pycddl", "pyrsistent"),
    *("pyutil.assertutil", "pyutil.dictutil", "pyutil.mathutil", "sqlite3", "treq"),
    *("twisted.internet.stdio", "twisted.plugin", "twisted.protocols.portforward"),
    *("twisted.scripts.twistd", "twisted.spread.pb", "twisted.web.client", "twisted.web.static"),
    *("twisted.web.template", "txtorcon", "werkzeug.routing", "wormhole.wormhole", "yaml"),
    *("zfec.easyfec",),
)
"""What Tahoe-LAFS stands on: none of it is its own. What is not installed is left out."""

HEADER_BYTES = 4
STREAMS = 3


def settings_of(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return what an interpreter that begins reads of an environment."""
    return tuple(sorted(each for each in environment.items() if each[0].startswith(ALREADY)))


class Request:
    """
    What a process is to be.

    Args:
        packed: as ``tests.forked.program`` writes it; in the place of a module a program's path may stand.
        streams: descriptors that become the standard streams.
    """

    def __init__(self, packed: bytes, streams: list[int]) -> None:
        self.module, self.directory, umask, count, *rest = map(os.fsdecode, packed.split(b"\0"))
        self.program = self.module if os.path.isabs(self.module) else None
        self.umask = int(umask)
        self.arguments = rest[: int(count)]
        self.environment = dict(each.split("=", 1) for each in rest[int(count) :])
        self.streams = streams


class Server:
    """
    Where the forks are made.

    Args:
        path: of the socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._settings = settings_of(os.environ)
        self._children: dict[int, socket.socket | None] = {}
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> Request | None:
        """Fork until standard input ends: returns None then, and in each child what it is to be."""
        while True:
            asked: list[int | socket.socket] = [
                0,
                self._awake,
                self._listener,
                *filter(None, self._children.values()),
            ]
            ready, _, _ = select.select(asked, [], [])
            if self._awake in ready:
                os.read(self._awake, 4096)
                self._reap()
            if self._listener in ready:
                request = self._answer()
                if request is not None:
                    return request
            for pid, connection in list(self._children.items()):
                if connection is not None and connection in ready:
                    self._signal(pid, connection)
            if 0 in ready:
                for pid in self._children:  # whom nobody hears any more
                    os.kill(pid, signal.SIGKILL)
                self._path.unlink()
                self._path.parent.rmdir()
                return None

    def _answer(self) -> Request | None:
        """Take a request; returns it in the child."""
        connection, _ = self._listener.accept()
        try:
            header, streams, _, _ = socket.recv_fds(connection, HEADER_BYTES, STREAMS)
            length = int.from_bytes(header, "big")
            with connection.makefile("rb") as file:
                request = Request(file.read(length), streams)
        except (OSError, ValueError):  # who asked is gone
            connection.close()
            return None
        if settings_of(request.environment) != self._settings:
            connection.sendall(b"an interpreter that reads this has to begin with it\n")
            connection.close()
            pid = None
        else:
            pid = os.fork()
        if pid == 0:
            connection.close()
            self._forget()
            return request
        for stream in streams:
            os.close(stream)
        if pid is not None:
            self._children[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % pid)
        return None

    def _forget(self) -> None:
        """Be no server any more."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener.close()
        for each in (self._awake, self._wake):
            os.close(each)
        for connection in filter(None, self._children.values()):
            connection.close()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            connection = self._children.pop(pid)
            if connection is not None:
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))

    def _signal(self, pid: int, connection: socket.socket) -> None:
        """Hand a signal on; the child is not reaped yet, so its number is its own."""
        try:
            asked = connection.recv(1)
        except OSError:
            asked = b""
        os.kill(pid, asked[0] if asked else signal.SIGKILL)
        if not asked:
            connection.close()
            self._children[pid] = None


def load() -> None:
    """Import what commands do, in their way."""
    from pipegrid.cli.startup.lazy_modules import install_lazy_modules, tls_put_off

    install_lazy_modules()
    with tls_put_off():
        for room in ROOMS:
            [path] = import_module(f"pipegrid.{room}").__path__
            for module in walk_packages([path], f"pipegrid.{room}."):
                if not module.name.removeprefix("pipegrid.").startswith(NOT):
                    _load(module.name)
        for name in OTHERS:
            _load(name)


def _load(name: str) -> None:
    import_module(name)
    if "twisted.internet.reactor" in sys.modules:
        raise AssertionError(f"{name} makes a reactor, which all that is forked would share")


def load_beneath() -> None:
    """Import what a program stands on."""
    for name in BENEATH:
        with contextlib.suppress(ImportError):
            import_module(name)


def renew_reactor() -> None:
    """Have a reactor of this process's own: what the server made waits where all would wait."""
    made = sys.modules.get("twisted.internet.reactor")
    if made is not None:
        made.__init__()  # type: ignore[misc]  # who has it already goes on with it


def become(request: Request) -> None:
    """Take on what makes a process this one rather than another."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(request.umask)
    os.chdir(request.directory)
    os.environ.clear()
    os.environ.update(request.environment)
    program = request.program
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH, of Python 3.11 and later
        sys.path[0] = os.getcwd() if program is None else str(Path(program).parent)
    sys.argv = ["-m" if program is None else program, *request.arguments]
    begun_with = ["-m", request.module] if program is None else [program]
    sys.orig_argv = [sys.executable, *begun_with, *request.arguments]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open(number, name)


def _open(number: int, name: str) -> None:
    """Make a standard stream anew, as an interpreter does that begins; how depends on what it leads to."""
    before: io.TextIOWrapper = getattr(sys, name)
    mode = "r" if name == "stdin" else "w"
    raw = io.FileIO(number, f"{mode}b", closefd=False)
    raw.name = f"<{name}>"
    buffer: io.BufferedIOBase | io.RawIOBase = raw
    if name == "stdin":
        buffer = io.BufferedReader(raw)
    elif not before.write_through:  # as with PYTHONUNBUFFERED
        buffer = io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        cast(io.BufferedWriter, buffer),
        encoding=before.encoding,
        errors=before.errors,
        newline="\n",
        line_buffering=not before.write_through and (name == "stderr" or raw.isatty()),
        write_through=before.write_through,
    )
    stream.mode = mode  # type: ignore[misc]
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def main() -> None:
    """Be the server, and in each child what it is asked to be."""
    if len(sys.argv) > 2:
        load_beneath()
    else:
        load()
    if threading.active_count() > 1:
        raise AssertionError("threads are not forked")
    gc.collect()
    gc.freeze()  # what is never looked at is never copied
    server = Server(Path(sys.argv[1]))
    print("ready", flush=True)
    try:
        request = server.serve()
    except KeyboardInterrupt:  # at a terminal, all that the tests began are told
        request = None
    if request is not None:
        become(request)
        if request.program is None:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        else:
            renew_reactor()
            runpy.run_path(request.program, run_name="__main__")


if __name__ == "__main__":
    main()

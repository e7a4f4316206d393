"""
Commands in processes that are forked for them: ``subprocess.run([sys.executable, "-m", …])``, but faster.

``tests.forked.server`` forks them, and says in what they differ from others. It is begun when it is first
asked for, one for each set of settings that interpreters take from their environment, and ends with this one.
"""

from __future__ import annotations

import atexit
import os
import selectors
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.forked.program import ask
from tests.forked.server import settings_of

HERE = Path(__file__).parent
STOP_S = 20.0


class _Running:
    """A server's process, and where it is asked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pg")) / "socket"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(self.path)],
            cwd="/",
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        atexit.register(self.stop)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.path.parent.rmdir()
            raise AssertionError(f"the server of forks ended with status {self._process.wait()}")

    def stop(self) -> None:
        """End it."""
        self._process.communicate(timeout=STOP_S)


_servers: dict[object, _Running] = {}


def _server(environment: Mapping[str, str]) -> _Running:
    settings = settings_of(environment)
    if settings not in _servers:
        _servers[settings] = _Running(environment)
    return _servers[settings]


def run(
    module: str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    data: bytes | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """
    Run a module in a process of its own.

    Args:
        data: what it reads on its standard input; None for ``/dev/null``.

    Raises:
        subprocess.TimeoutExpired: it was not over in time, and was ended.
    """
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.connect(str(_server(env).path))
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        for each in (out, err):
            stack.callback(os.close, each)
        streams = [_source(data), out_end, err_end]
        try:
            ask(connection, streams, module, cwd, arguments, env)
        finally:
            for each in streams:
                os.close(each)
        try:
            printed = _read((out, err), deadline)
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            with connection.makefile() as file:
                said = file.read().split()
        except TimeoutError:  # the end of the connection ends it
            raise subprocess.TimeoutExpired([module, *arguments], timeout) from None
    if len(said) != 2:
        raise AssertionError(f"the server of forks said {said}")
    return subprocess.CompletedProcess([module, *arguments], int(said[1]), *printed)


def _source(data: bytes | None) -> int:
    """Return a descriptor where some bytes are read."""
    if data is None:
        return os.open(os.devnull, os.O_RDONLY)
    reading, writing = os.pipe()

    def feed() -> None:
        with suppress(BrokenPipeError), open(writing, "wb") as file:
            file.write(data)

    threading.Thread(target=feed).start()
    return reading


def _read(ends: tuple[int, ...], deadline: float) -> list[bytes]:
    """Return what comes out of pipes until all who write there have closed them."""
    found = {end: bytearray() for end in ends}
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return [bytes(found[end]) for end in ends]


def script(environment: Mapping[str, str], module: str) -> str:
    """
    Return what a shell runs in the place of ``python -m MODULE``: a program that asks the server.

    Args:
        environment: of the shell.
    """
    program = [
        sys.executable,
        "-IS",
        str(HERE / "program.py"),
        str(_server(environment).path),
        module,
    ]
    return f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n'

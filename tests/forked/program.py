"""
Asks ``tests.forked.server`` for a command, and stands for it: ``program.py SOCKET MODULE ARGUMENT…``.

Signals go to the command, and its status comes from there. It is run with ``-IS``, and imports only what it
must, neither ``socket`` nor ``signal``, so that all of it takes hardly longer than an interpreter alone.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

HEADER_BYTES = 4


def ask(
    connection: Any,
    streams: Sequence[int],
    module: str,
    directory: str | os.PathLike[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Have a module run, with these standard streams."""
    umask = os.umask(0)
    os.umask(umask)
    variables = [f"{name}={value}" for name, value in environment.items()]
    fields = [module, directory, str(umask), str(len(arguments)), *arguments, *variables]
    packed = b"\0".join(map(os.fsencode, fields))  # none of them can have a zero byte in it
    rights = b"".join(each.to_bytes(4, sys.byteorder) for each in streams)
    header = len(packed).to_bytes(HEADER_BYTES, "big")
    connection.sendmsg([header], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    connection.sendall(packed)


def main() -> None:
    """Be the command."""
    path, module, *arguments = sys.argv[1:]
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    ask(connection, (0, 1, 2), module, os.getcwd(), arguments, os.environ)
    said = b""
    while True:
        more = connection.recv(4096)
        if not more:
            break
        said += more
    words = said.split()
    if len(words) != 2:
        sys.exit(f"{path}: {said!r}")
    status = int(words[1])
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()

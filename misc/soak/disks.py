"""
A disk that fills up, or becomes read-only, in the middle of an upload; and comes back.

    python -m misc.soak.disks [--megabytes 32]

A real ``pipegrid serve`` process stores on a small file system of its own (tmpfs), so it needs root. Half
of a share is written. Then somebody else fills the disk, or it is mounted read-only, as systems do when it
fails. What must hold: the other half is refused, with 507 or 500 and not with silence; what was stored
before is read; and when the disk is as before, the other half is taken, and the share read back whole.
Exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from misc.attack.measure import serve_command
from misc.attack.target import Target, make_target
from misc.ending import end_on_sigterm
from misc.soak.mounting import alone
from misc.speedtest.processes import first_line, running
from misc.speedtest.server import Connection

SHARE_BYTES = 4 << 20


class Violation(Exception):
    """What must hold does not."""


class World:
    """
    A disk of its own, and a server on it.

    Raises:
        OSError: a file system cannot be made or mounted here; one sentence.
    """

    def __init__(self, scratch: Path, megabytes: int) -> None:
        self.disk = scratch / "disk"
        self.disk.mkdir()
        self.target: Target
        self._scratch = scratch
        self._image = scratch / "image"
        self._server = contextlib.ExitStack()
        with open(self._image, "wb") as image:
            image.truncate(megabytes << 20)
        run("mkfs.ext4", "-q", str(self._image))
        self._mount()

    def start(self) -> None:
        """Start the server."""
        directory = self._scratch / "node"
        command = serve_command(directory, ("--storage", str(self.disk / "storage")))
        process = self._server.enter_context(running(command))
        self.target = make_target(first_line(process), first_line(process), directory, 0.0)

    def repair(self) -> None:
        """Do what an operator does with a disk that has failed, and start the server again."""
        self._server.close()
        run("umount", str(self.disk))
        subprocess.run(["e2fsck", "-p", str(self._image)], capture_output=True)
        self._mount()
        self.start()

    def fail(self) -> None:
        """Have the kernel believe that the disk has failed: it takes nothing from then on."""
        source = run("findmnt", "-n", "-o", "SOURCE", str(self.disk)).strip()
        Path(f"/sys/fs/ext4/{Path(source).name}/trigger_fs_error").write_text("1")

    def close(self) -> None:
        """Stop the server, and let the disk go."""
        self._server.close()
        subprocess.run(["umount", "--lazy", str(self.disk)], check=True)

    def _mount(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.disk))


def run(*command: str) -> str:
    """Run a program of the system's; returns what it prints. Raises OSError with one sentence."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise OSError(f"{command[0]} failed ({said}); run it as root, on a machine of its own")
    return done.stdout


def fill_up(world: World) -> Callable[[], None]:
    """Fill the disk; returns what to call to have it as before."""
    path = world.disk / "somebody-elses"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path.unlink


def fail(world: World) -> Callable[[], None]:
    """Have it fail, and so become read-only; returns what to call to have it as before."""
    world.fail()
    return world.repair


TROUBLES: dict[str, Callable[[World], Callable[[], None]]] = {"full": fill_up, "read-only": fail}


def one(world: World, trouble: str, rng: random.Random) -> str:
    """Let one trouble come and go; returns what the server said meanwhile. Raises Violation."""
    target = world.target
    requests = target.requests
    old, new, other = (rng.randbytes(16) for _ in range(3))
    content = rng.randbytes(SHARE_BYTES)
    half = SHARE_BYTES // 2
    expect(target, [requests.allocate(old, 4), requests.write(old, 0, b"abcd")], [200, 201])
    begun = [requests.allocate(new, SHARE_BYTES), requests.write(new, 0, content[:half])]
    expect(target, begun, [200, 200])
    end = TROUBLES[trouble](world)
    try:
        [(status, _)] = ask(target, [requests.write(new, half, content[half:])])
        if status not in (500, 507):
            raise Violation(f"{trouble}: the other half was answered with {status}")
        more = [requests.allocate(other, SHARE_BYTES), requests.write(other, 0, content)]
        statuses = [each for each, _ in ask(target, more)]
        if statuses[-1] < 400:
            raise Violation(f"{trouble}: another share was answered with {statuses}")
        if ask(target, [requests.read(old, 0, 4)]) != [(206, b"abcd")]:
            raise Violation(f"{trouble}: what was there is not read any more")
    finally:
        end()
    target = world.target
    requests = target.requests
    if ask(target, [requests.read(old, 0, 4)]) != [(206, b"abcd")]:
        raise Violation(f"{trouble}: what was there is lost")
    again = [requests.allocate(new, SHARE_BYTES), requests.write(new, 0, content)]
    expect(target, again, [200, 201])
    if ask(target, [requests.read(new, 0, SHARE_BYTES)]) != [(206, content)]:
        raise Violation(f"{trouble}: what was stored is not what was sent")
    return f"{trouble}: {status}, another share {statuses}, then stored"


def expect(target: Target, requests: Sequence[bytes], statuses: Sequence[int]) -> None:
    """Send requests; raise Violation unless they are answered like this."""
    found = [status for status, _ in ask(target, requests)]
    if found != list(statuses):
        raise Violation(f"answered with {found}, not with {list(statuses)}")


def ask(target: Target, requests: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Send requests on a connection of their own; returns status and body of each answer."""
    connection = Connection(target.requests.address)
    try:
        return list(connection.exchange(iter(requests), len(requests), 1))
    finally:
        connection.close()


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m misc.soak.disks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", file=out)
    rng = random.Random(options.seed)
    try:
        for trouble in TROUBLES:
            with (
                alone(),
                tempfile.TemporaryDirectory(prefix="pipegrid-disks-") as scratch,
                contextlib.closing(World(Path(scratch), options.megabytes)) as world,
            ):
                world.start()
                print(one(world, trouble, rng), file=out, flush=True)
    except OSError as error:
        print(f"disks: {error}", file=sys.stderr)
        return 2
    except Violation as error:
        print(f"broken: {error}", file=out)
        return 1
    return 0


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())

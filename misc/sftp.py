"""
SFTP with real programs: sshfs with what people do on a mounted directory, rclone, and many files.

A gateway with an embedded grid runs, and each step is a shell script that fails if its result is wrong; the
seconds that it took are printed. Steps on a mounted directory need ``/dev/fuse`` and sshfs, and are left out
without them, which is said.

    python -m misc.sftp [--files N] [--only NAME]

The status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from misc.command import command, environment
from misc.ending import end_on_sigterm
from misc.speedtest.peers.nodes import free_port

ROOT = Path(__file__).parent.parent
START_S = 60
STEP_S = 1500

MOUNTED = {
    "copy": """
        cp -r $ROOT/src/pipegrid/tree mnt/tree
        diff -r $ROOT/src/pipegrid/tree mnt/tree
        rm -r mnt/tree
        test -z "$(ls mnt)" """,
    "change": """
        echo one > mnt/f; echo two >> mnt/f; test "$(cat mnt/f)" = "one
two"
        truncate -s 5 mnt/f; test "$(stat -c %s mnt/f)" = 5
        truncate -s 100000 mnt/f; test "$(stat -c %s mnt/f)" = 100000
        printf X | dd of=mnt/f bs=1 seek=50000 conv=notrunc,fsync status=none
        test "$(tail -c +50001 mnt/f | head -c 1)" = X; test "$(head -c 3 mnt/f)" = one
        chmod 640 mnt/f; touch -d @1600000000 mnt/f; test "$(stat -c '%a %Y' mnt/f)" = "640 1600000000"
        echo new > mnt/f.tmp; mv mnt/f.tmp mnt/f; test "$(cat mnt/f)" = new
        ! ln -s f mnt/link; rm mnt/f""",
    "vim": """
        vim -u NONE -N -es -c 'normal ione' -c wq mnt/v.txt
        vim -u NONE -N -es -c 'set backup backupskip= backupcopy=no' -c 'normal otwo' -c wq mnt/v.txt
        test "$(cat mnt/v.txt)" = "one
two"; test "$(cat mnt/v.txt~)" = one
        rm mnt/v.txt*""",
    "rsync": """
        rsync -a $ROOT/src/pipegrid/core/ mnt/rs/
        sleep 4; test -z "$(rsync -ani --omit-dir-times $ROOT/src/pipegrid/core/ mnt/rs/)"
        rsync -a --delete $ROOT/src/pipegrid/flow/ mnt/rs/
        diff -r $ROOT/src/pipegrid/flow mnt/rs; rm -r mnt/rs""",
    "git": """
        git init -q made; cd made; git config user.email a@b; git config user.name a
        for n in $(seq 60); do mkdir -p d$((n % 7)); echo $n > d$((n % 7))/$n; done
        git add .; git commit -qm one
        cd ..; git clone -q made mnt/clone; cd mnt/clone; git config user.email a@b; git config user.name a
        echo more >> d1/1; git commit -qam two; git status --porcelain; test -z "$(git status --porcelain)"
        git fsck; git push -q origin HEAD:copy; git -C ../../made log --oneline copy | grep two
        git checkout -q HEAD~1; git gc -q; git checkout -q -; cd ../..; rm -r mnt/clone""",
    "many": """
        mkdir src mnt/many; seq $FILES | (cd src; xargs -n 100 touch)
        for n in $(seq 1 100 $FILES); do echo $n > src/$n; done
        cp -r src/. mnt/many/; test "$(ls mnt/many | wc -l)" = $FILES; diff -r src mnt/many""",
    "many, listed": """
        test "$(ls -l mnt/many | wc -l)" = $((FILES + 1))""",
}

PLAIN = {
    "sftp": """
        head -c 20000000 /dev/urandom > big
        printf 'put big\\nget big back\\n' | sftp -q -F ssh.cfg -b - grid >&2
        cmp big back""",
    "rclone": """
        export RCLONE_CONFIG=$PWD/rclone.conf
        rclone config create grid sftp host=127.0.0.1 port=$PORT user=bob \\
            key_file=$PWD/id shell_type=none >&2
        rclone sync -q $ROOT/src/pipegrid/core grid:core
        rclone check -q --download $ROOT/src/pipegrid/core grid:core
        rclone sync -q $ROOT/src/pipegrid/flow grid:core
        rclone check -q --download $ROOT/src/pipegrid/flow grid:core
        rclone moveto grid:big grid:large; rclone cat grid:large | cmp - big; rclone about grid: >&2
        rclone purge grid:core; rclone deletefile grid:large
        test -z "$(rclone lsf grid:)" """,
}


def prepare(home: Path, port: int) -> None:
    """Make a client's directory with one account, and what OpenSSH's programs are told."""
    for words in (command("c", "init", "--local"),):
        subprocess.run(words, cwd=home, env=environment(), check=True, stdout=sys.stderr)
    made = subprocess.run(
        command("c", "mkdir"), cwd=home, env=environment(), check=True, stdout=subprocess.PIPE
    )
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "id"], cwd=home, check=True
    )
    key = (home / "id.pub").read_text().strip()
    (home / "c/private/accounts").write_text(f"bob {key} {made.stdout.decode().strip()}\n")
    with (home / "c/pipegrid.cfg").open("a") as file:
        file.write(f"[sftpd]\nenabled = true\nport = tcp:{port}:interface=127.0.0.1\n")
    (home / "ssh.cfg").write_text(
        f"Host *\n HostName 127.0.0.1\n Port {port}\n User bob\n IdentityFile {home}/id\n"
        f" StrictHostKeyChecking accept-new\n UserKnownHostsFile {home}/known\n LogLevel ERROR\n"
    )


@contextlib.contextmanager
def running_gateway(home: Path) -> Iterator[None]:
    """Have a gateway run."""
    words = command("c", "gateway", "--port", "tcp:0:interface=127.0.0.1", "--log", "log")
    with subprocess.Popen(words, cwd=home, env=environment(), stdout=subprocess.DEVNULL) as gateway:
        try:
            until_s = time.monotonic() + START_S
            while not (home / "c/node.url").exists() and time.monotonic() < until_s:
                time.sleep(0.1)
            yield
        finally:
            gateway.terminate()
    if gateway.returncode:
        sys.exit(f"the gateway ended with status {gateway.returncode}")


@contextlib.contextmanager
def mounted(home: Path) -> Iterator[None]:
    """Have the account's directory mounted at ``mnt``."""
    (home / "mnt").mkdir()
    words = ["sshfs", "-F", str(home / "ssh.cfg"), "grid:/", "mnt"]
    subprocess.run(words, cwd=home, check=True)
    try:
        yield
    finally:
        subprocess.run(["fusermount", "-u", "-z", "mnt"], cwd=home, check=False)


def run_step(home: Path, port: int, name: str, script: str, files: int) -> bool:
    """Run one step; returns whether its result was right."""
    variables = {"ROOT": str(ROOT), "FILES": str(files), "PORT": str(port), "HOME": str(home)}
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=home,
        env=os.environ | variables,
        stdout=sys.stderr,
        timeout=STEP_S,
        check=False,
    )
    good = done.returncode == 0
    print(f"{name}: {'right' if good else 'WRONG'}, {time.monotonic() - began_s:.1f} s", flush=True)
    return good


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description="SFTP with real programs.")
    parser.add_argument("--files", type=int, default=10_000, help="files in one directory")
    parser.add_argument("--only", help="run this step alone")
    chosen = parser.parse_args()
    end_on_sigterm()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        home, port = Path(name), free_port()
        prepare(home, port)
        with running_gateway(home):
            can_mount = os.access("/dev/fuse", os.W_OK) and shutil.which("sshfs") is not None
            if not can_mount:
                print("without /dev/fuse or sshfs nothing is mounted")
            with mounted(home) if can_mount else contextlib.nullcontext():
                steps = PLAIN | (MOUNTED if can_mount else {})
                for step, script in steps.items():
                    if chosen.only is None or step.startswith(chosen.only):
                        failed += not run_step(home, port, step, script, chosen.files)
            log = (home / "log").read_text() if (home / "log").exists() else ""
            if "Traceback" in log or "URI:" in log:
                print("the log has a traceback or a cap: WRONG")
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""
Run ``make demo`` and ``make test`` on a bare Debian: what a new user meets who has just cloned the project.

The root is a directory of its own, made by mmdebstrap with Python, make, git and certificates, nothing else.
It is given this machine's settings of apt and pip, and what is committed in this checkout. Commands run there
in namespaces of their own, with what is mounted there, so that nothing stays mounted or running, however this
ends. Needs root, mmdebstrap and unshare.

    python misc/fresh.py [--suite SUITE] [--tests TESTS] [--keep]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "/root/pipegrid"
"""Where the clone is, in the root."""

INCLUDED = "python3,python3-venv,make,git,ca-certificates"
OWN_CERTIFICATES = Path("/usr/local/share/ca-certificates")
LIMIT_S = 7200
"""How long the tests may take: everything is compiled for the first time, perhaps beside much else."""

APT = ("auth.conf", "auth.conf.d", "keyrings", "trusted.gpg", "trusted.gpg.d")
"""Below /etc/apt: with what archives are opened and believed."""

PIP = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
"""Variables that name files of certificates."""

PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
NO_SERVICES = "#!/bin/sh\nexit 101\n"
"""What keeps packages from starting services, as on any root that nothing boots."""


def lines(*command: str) -> list[str]:
    """Return the lines that a program prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout.splitlines()


def sources(suite: str) -> list[str]:
    """Return apt's sources from which this machine gets a suite, a line each; none if it gets another."""
    form = "$(CREATED_BY)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)"
    found: dict[str, None] = {}
    for line in lines("apt-get", "indextargets", "--no-release-info", "--format", form):
        created_by, uri, release, component, signed_by = line.split("|", 4)
        if created_by == "Packages" and release in (suite, f"{suite}-updates", f"{suite}-security"):
            signed = f"[signed-by={signed_by}] " if signed_by.startswith("/") else ""
            found[f"deb {signed}{uri} {release} {component}"] = None
    return list(found)


def fetching() -> str:
    """Return this machine's settings of how apt fetches: proxies, certificates, dates."""
    return "".join(f"{line}\n" for line in lines("apt-config", "dump", "Acquire"))


def copy(source: Path, root: Path) -> None:
    """Copy a file or a directory, if it is there, to the same place below a root."""
    target = root / source.relative_to("/")
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of the environment says how to reach the network and a package index."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("PIP_") or name.lower() in PROXIES or name in CERTIFICATES
    }


def named_paths(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield the local files and directories that such settings name, but the one of all certificates."""
    for value in variables.values():
        for word in value.split():
            path = Path(word)
            if path.is_absolute() and path.parts[:3] != ("/", "etc", "ssl") and path.exists():
                yield path


def make_root(root: Path, suite: str) -> None:
    """
    Make the bare root, with this machine's settings and a clone of the checkout.

    Raises:
        subprocess.CalledProcessError: mmdebstrap or git failed, and has said why.
    """
    apt_settings = root.parent / "apt.conf"
    apt_settings.write_text(fetching())
    subprocess.run(
        [
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=apt", f"--include={INCLUDED}"),
            *(f"--aptopt={apt_settings}", suite, str(root), *sources(suite)),
        ],
        check=True,
    )
    for name in APT:
        copy(Path("/etc/apt", name), root)
    for name in PIP:
        path = Path(name).expanduser()
        if path.exists():
            target = "/root" / Path(name).relative_to("~") if name.startswith("~") else path
            (root / target.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / target.relative_to("/"))
    copy(OWN_CERTIFICATES, root)
    for path in named_paths(settings(os.environ)):
        copy(path, root)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    no_services = root / "usr/sbin/policy-rc.d"
    no_services.write_text(NO_SERVICES)
    no_services.chmod(0o755)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{root}{INSIDE}"], check=True)


def mount(*arguments: str) -> None:
    """Mount something, in the namespace of this process alone."""
    subprocess.run(["mount", *arguments], check=True)


def mount_all(root: Path) -> None:
    """Mount in a root what every running system has."""
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "sysfs", "-o", "ro", "sysfs", f"{root}/sys")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", f"{root}/dev")
    for name in DEVICES:
        Path(root, "dev", name).touch()
        mount("--bind", f"/dev/{name}", f"{root}/dev/{name}")
    for name in ("pts", "shm"):
        Path(root, "dev", name).mkdir()
    mount(
        "-t", "devpts", "-o", "newinstance,ptmxmode=666,gid=5,mode=620", "devpts", f"{root}/dev/pts"
    )
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", f"{root}/dev/shm")
    for name, target in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        Path(root, "dev", name).symlink_to(target)


def run(root: Path, *command: str) -> int:
    """Run a command in a root, and wait for orphans there meanwhile; return its exit status."""
    environment = {
        "HOME": "/root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TERM": os.environ.get("TERM", "dumb"),
        **settings(os.environ),
    }
    child = subprocess.Popen(["chroot", str(root), *command], env=environment)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


def inside(root: Path, tests: str) -> int:
    """Do all that is done in the root, as its first process; return the exit status."""
    mount_all(root)
    if run(root, "update-ca-certificates"):
        return 1
    statuses = {}
    for words in (["demo"], ["test", f"TESTS={tests}", f"LIMIT_S={LIMIT_S}"]):
        begun = time.monotonic()
        status = run(root, "make", "-C", INSIDE, *words)
        seconds = round(time.monotonic() - begun)
        statuses[words[0]] = f"make {words[0]}: exit status {status}, {seconds} s"
        print(statuses[words[0]], file=sys.stderr)
        if status:
            return 1
    print("; ".join(statuses.values()), file=sys.stderr)
    return 0


def outside(suite: str, tests: str, keep: bool) -> int:
    """Make a root, have everything done in it, and remove it; return the exit status."""
    directory = Path(
        tempfile.mkdtemp(prefix="pipegrid-fresh-", dir=os.environ.get("TMPDIR", "/var/tmp"))
    )
    root = directory / "root"
    try:
        directory.chmod(0o755)  # apt fetches as a user of its own
        make_root(root, suite)
        child = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *(sys.executable, __file__, "--inside", str(root), "--tests", tests),
            ]
        )
        try:
            return child.wait()
        finally:
            child.kill()  # with it ends all that runs in the root
            child.wait()
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed with status {error.returncode}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if keep:
            print(f"The root is left in {root}.", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)


def interrupt(number: int, frame: object) -> None:
    """End as by Ctrl-C."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().partition("\n")[0])
    parser.add_argument(
        "--suite", default="bookworm", help="Debian's release (default: %(default)s)"
    )
    parser.add_argument("--tests", default="tests", help="what trial runs (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="do not remove the root at the end")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return inside(options.inside, options.tests)
    if os.geteuid() != 0:
        print("make fresh needs root: it makes a Debian root and runs in it.", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    return outside(options.suite, options.tests, options.keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""
Find what the targets of ``make`` need of the system, and install all of it that is missing in one step.

``make`` runs this once, before anything else and before anything in parallel. What is needed is in ``NEEDS``:
to add something, add a row there. On Debian and its kin root installs what is missing with apt-get; anybody
else is shown the complete list. It runs with nothing installed, and on Pythons that are too old, and says so.

    python misc/prerequisites.py TARGET ...
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

OLDEST_PYTHON = (3, 10)
LOCK_S = 600
"""How long another program that installs packages is waited for."""

RETRY_S = 2.0
LOCKED = ("could not get lock", "unable to lock", "unable to acquire the dpkg frontend lock")
WHERE_TOO = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where programs are that only root has on the path."""

FONT_DIRECTORIES = ("/usr/share/fonts", "/usr/local/share/fonts", "/Library/Fonts")
TESTS = ("test", "trial", "coverage", "pythons", "lowest", "newest")
TAHOE = (*TESTS, "interop", "peers", "peers-mutable", "trees", ".venv-tahoe/.installed")


def command(*names: str) -> Callable[[], bool]:
    """Return whether one of these programs is installed, as a question to be asked later."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *WHERE_TOO))
    return lambda: any(shutil.which(name, path=path) for name in names)


def library(*names: str) -> Callable[[], bool]:
    """Return whether one of these shared libraries can be loaded."""

    def found() -> bool:
        for name in names:
            try:
                ctypes.CDLL(name)
            except OSError:
                continue
            return True
        return False

    return found


def modules(*names: str) -> Callable[[], bool]:
    """Return whether this Python has all of these modules, of which Debian has packages of their own."""

    def found() -> bool:
        try:
            for name in names:
                importlib.import_module(name)
        except ImportError:
            return False
        return True

    return found


def file(*paths: str) -> Callable[[], bool]:
    """Return whether one of these files is there."""
    return lambda: any(os.path.exists(path) for path in paths)


def fonts() -> bool:
    """Return whether there is any scalable font."""
    roots = [Path(each) for each in FONT_DIRECTORIES]
    return any(True for root in roots for kind in ("ttf", "otf") for _ in root.rglob(f"*.{kind}"))


def compiler() -> bool:
    """Return whether extensions of this Python can be compiled, or Tahoe-LAFS, which needs some, is there."""
    if Path(".venv-tahoe/.installed").exists():
        return True
    words = shlex.split(sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    try:
        done = subprocess.run(
            [*words, "-fsyntax-only", "-I", include, "-x", "c", "-"],
            input=b"#include <Python.h>\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def system_python() -> str:
    """Return how the names of Debian's packages for this Python begin, or nothing if it is not Debian's."""
    if sys.base_prefix != "/usr":
        return ""
    default = Path("/usr/bin/python3")
    mine = f"python3.{sys.version_info[1]}"
    return "python3" if default.resolve().name == mine else mine


def of_python(suffix: str) -> str:
    """Return the package of Debian's with a part of this Python, or nothing."""
    name = system_python()
    return f"{name}-{suffix}" if name else ""


@dataclass(frozen=True)
class Need:
    """Something that targets need of the system."""

    what: str
    found: Callable[[], bool]
    packages: str
    """Debian's, with blanks between; none if it has none for this Python."""
    reason: str
    targets: tuple[str, ...] = ()
    """None: all of them."""

    optional: bool = False
    """Whether the targets do what they can without it."""


NEEDS = (
    Need(
        "the modules venv and ensurepip",
        modules("venv", "ensurepip"),
        of_python("venv"),
        "to install into an environment of its own",
    ),
    Need(
        "a C compiler and Python's headers",
        compiler,
        f"gcc libc6-dev {of_python('dev')}",
        "to build netifaces, which Tahoe-LAFS needs",
        TAHOE,
    ),
    Need(
        "Chromium",
        command("chromium", "chromium-browser", "google-chrome"),
        "chromium",
        "to look at the report of the speed test and to use the web interface",
        (*TESTS, "buildbot"),
    ),
    Need(
        "a font",
        fonts,
        "fonts-dejavu-core",
        "to look at both",
        (*TESTS, "buildbot"),
    ),
    Need(
        "ISA-L",
        library("libisal.so.2", "libisal.2.dylib"),
        "libisal2",
        "for fast erasure coding",
        (*TESTS, "budgets", "peers", "peers-mutable", "trees"),
    ),
    Need("bash", command("bash"), "bash", "to try completion in it", TESTS),
    Need(
        "bash-completion",
        file("/usr/share/bash-completion/bash_completion"),
        "bash-completion",
        "to try that completion is found there",
        TESTS,
    ),
    Need("unzip", command("unzip"), "unzip", "to extract a directory that was downloaded", TESTS),
    Need("zsh", command("zsh"), "zsh", "to try completion in it", TESTS),
    Need("fish", command("fish"), "fish", "to try completion in it", TESTS),
    Need("man", command("man"), "man-db", "to show the manual page", TESTS),
    Need("mandoc", command("mandoc"), "mandoc", "to check the manual page", TESTS),
    Need(
        "gpg",
        command("gpg"),
        "gpg gpg-agent",
        "to sign the archives that are mirrored",
        (*TESTS, "mirror"),
    ),
    Need(
        "gpgv",
        command("gpgv"),
        "gpgv",
        "to check signatures of archives",
        (*TESTS, "mirror", "crash"),
    ),
    Need(
        "nginx",
        command("nginx"),
        "nginx-light",
        "to mirror from real web servers",
        (*TESTS, "crash", "mirror"),
    ),
    Need(
        "curl",
        command("curl"),
        "curl",
        "to compare with another client",
        (*TESTS, "crash", "mirror"),
    ),
    Need("restic", command("restic"), "restic", "to back up to a gateway", (*TESTS, "restic")),
    Need(
        "rclone",
        command("rclone"),
        "rclone",
        "to compare with it, and to use a gateway's SFTP",
        ("restic", "sftp"),
    ),
    Need(
        "OpenSSH's sftp",
        command("sftp"),
        "openssh-client",
        "to use a gateway's SFTP",
        (*TESTS, "sftp"),
    ),
    Need(
        "FUSE",
        lambda: command("fusermount3")() and library("libfuse3.so.3", "libfuse3.so.4")(),
        "fuse3",
        "to mount backups",
        (*TESTS, "mount"),
    ),
    Need("sshfs", command("sshfs"), "sshfs", "to mount a gateway", ("sftp",), True),
    Need("git", command("git"), "git", "to work on a mounted gateway", ("sftp",), True),
    Need("rsync", command("rsync"), "rsync", "to work on a mounted gateway", ("sftp",), True),
    Need("vim", command("vim"), "vim", "to work on a mounted gateway", ("sftp",), True),
    Need("wget2", command("wget2"), "wget2", "to compare with it", ("mirror",), True),
    Need("aria2c", command("aria2c"), "aria2", "to compare with it", ("mirror",), True),
    Need(
        "apt-mirror",
        command("apt-mirror"),
        "apt-mirror",
        "to compare with it",
        ("mirror",),
        True,
    ),
    Need(
        "debmirror",
        command("debmirror"),
        "debmirror",
        "to compare with it",
        ("mirror",),
        True,
    ),
    *(
        Need(what, command(what), package, "to make archives", targets, bool(optional))
        for what, package in (
            ("apt-ftparchive", "apt-utils"),
            ("dpkg-scanpackages", "dpkg-dev"),
            ("createrepo_c", "createrepo-c"),
            ("rpmbuild", "rpm"),
        )
        for targets, optional in ((("mirror", "mirror-world"), False), (TESTS, True))
    ),
    Need(
        "dnf",
        command("dnf"),
        "dnf dnf-plugins-core",
        "to compare with it",
        (*TESTS, "mirror", "mirror-world"),
        True,
    ),
    Need("reprepro", command("reprepro"), "reprepro", "to make Debian archives", ("mirror-world",)),
    Need("aptly", command("aptly"), "aptly", "to make Debian archives", ("mirror-world",)),
    Need(
        "mmdebstrap", command("mmdebstrap"), "mmdebstrap", "to make a bare Debian root", ("fresh",)
    ),
    Need("unshare", command("unshare"), "util-linux", "to run in a bare Debian root", ("fresh",)),
    Need(
        "Tor and its tool tor-gencert",
        lambda: command("tor")() and command("tor-gencert")(),
        "tor",
        "for a private network of onion services",
        ("interop",),
    ),
)


def missing(targets: Iterable[str], needs: Sequence[Need] = NEEDS) -> list[Need]:
    """Return what these targets need and is not there."""
    wanted = set(targets)
    return [
        each
        for each in needs
        if (not each.targets or wanted & set(each.targets)) and not each.found()
    ]


def packages(needs: Iterable[Need]) -> list[str]:
    """Return the packages that have it all, each once."""
    return list(dict.fromkeys(name for each in needs for name in each.packages.split()))


def listing(needs: Sequence[Need]) -> str:
    """Return what is missing, one a line, with the package and the reason."""
    lines = [
        (each.what, f"Debian: {each.packages}" if each.packages else "", each.reason)
        for each in needs
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(
        f"  {what:{widths[0]}}  {package:{widths[1]}}  {reason}" for what, package, reason in lines
    )


def apt_get(*arguments: str) -> bool:
    """Run apt-get, and again while another program installs packages; return whether it succeeded."""
    line = ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={LOCK_S}", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    until = time.monotonic() + LOCK_S
    while True:
        done = subprocess.run(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if not done.returncode:
            return True
        said = done.stdout.decode("utf-8", "replace")
        # The timeout is for dpkg's lock alone; those of the package lists and of the archives have none.
        if time.monotonic() > until or not any(each in said.lower() for each in LOCKED):
            sys.stderr.write(said)
            return False
        time.sleep(RETRY_S)


def install(names: Sequence[str]) -> bool:
    """Install packages of Debian's; return whether apt-get says so."""
    print(f"Installing {', '.join(names)} (apt-get).", file=sys.stderr)
    sys.stderr.flush()
    return apt_get("update") and apt_get("install", "--yes", "--no-install-recommends", *names)


def main(targets: Sequence[str]) -> int:
    """Install what is missing, or say what it is; return the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        print(
            f"PipeGrid needs Python {wanted} or later, and {sys.executable} is"
            f" {sys.version.split()[0]}; name another: make PYTHON=python{wanted}",
            file=sys.stderr,
        )
        return 1
    lacking = missing(targets)
    names = packages(lacking)
    apt = shutil.which("apt-get") is not None
    if names and apt and os.geteuid() == 0:
        if not install(names):
            print("apt-get has failed.", file=sys.stderr)
        importlib.invalidate_caches()
        lacking = missing(targets)
    for each in lacking:
        if each.optional:
            print(f"{each.what} is not installed, and left out.", file=sys.stderr)
    lacking = [each for each in lacking if not each.optional]
    if not lacking:
        return 0
    print(f"make {' '.join(targets)} needs what is missing here:", file=sys.stderr)
    print(listing(lacking), file=sys.stderr)
    if apt and packages(lacking):
        line = " ".join(packages(lacking))
        print(
            "Install it as root (then `make` does it, too):\n"
            f"  apt-get install --no-install-recommends {line}",
            file=sys.stderr,
        )
    else:
        print("Install it with your system's packages.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

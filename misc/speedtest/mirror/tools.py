"""
The tools that are compared: how each is told to fetch an archive, and where it puts it.

Each gets as many connections as do it good. What a tool verifies by itself is its own business; what it has
left is hashed afterwards, outside the time that counts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from misc.command import environment
from misc.speedtest.mirror.archive import ARCHITECTURE, COMPONENT, SUITE, Package

PIPEGRID = "pipegrid"
SHARED = "pipegrid --jobs 2"
AT_ONCE = 32
"""Connections of tools that have no pipelining. More gained none of them anything here."""

APT_MIRROR2 = "apt-mirror2"
DCS = "dcs-debmirror"
"""
A Go program of 2014 that pipelines 99 requests on each of ten connections and looks at no hash. No registry
has it: whoever has built it puts it in the path. It knows no port but 80.
"""


@attrs.frozen
class Task:
    """
    What is to be fetched.

    Attributes:
        urls: of the mirrors; tools that know only one take the first.
        packages: what is wanted of them.
        list_path: names the same, for ``pipegrid mirror list``.
        place: an empty directory, for the tool alone.
        authority: whom to trust with certificates; None where nobody needs to.
    """

    urls: Sequence[str]
    packages: Sequence[Package]
    list_path: Path
    place: Path
    authority: Path | None = None

    @property
    def host(self) -> str:
        """HOST:PORT of the first mirror."""
        return self.urls[0].split("//", 1)[1].rstrip("/")


@attrs.frozen
class Call:
    """
    How a tool is called.

    Attributes:
        tree: below which the files are when it has ended.
    """

    command: list[str]
    tree: Path
    environment: dict[str, str] = attrs.Factory(lambda: dict(os.environ))


@attrs.frozen
class Tool:
    """
    One of those that are compared.

    Attributes:
        prepare: writes what the tool reads besides the archive, and returns how it is called.
        program: what must be installed for it.
        https: whether it can be told to trust our authority.
        slow: asks for one file after the other, and is asked for little.
        port: the only one where it looks for the first mirror.
    """

    name: str
    prepare: Callable[[Task], Call]
    program: str
    https: bool = False
    slow: bool = False
    port: int | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is installed."""
        return find(self.program) is not None


def find(program: str) -> str | None:
    """Return where a program is; our own environments' are found beside Python."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


def pipegrid(task: Task, *options: str) -> Call:
    """``pipegrid mirror list``, with its defaults."""
    surroundings = environment()
    del surroundings["PYTHONDONTWRITEBYTECODE"]  # as it is installed, it has been compiled
    if task.authority is not None:
        surroundings["SSL_CERT_FILE"] = str(task.authority)
    tree = task.place / "tree"
    mirrors = [word for url in task.urls for word in ("--from", url)]
    command = [sys.executable, "-m", "pipegrid.cli", "--json", "mirror", "list"]
    return Call([*command, str(task.list_path), str(tree), *mirrors, *options], tree, surroundings)


def checked_out(directory: Path) -> Tool:
    """Return the ``pipegrid`` of another checkout, another version say."""

    def prepare(task: Task) -> Call:
        call = pipegrid(task)
        call.environment["PYTHONPATH"] = str(directory.resolve() / "src")
        return call

    return Tool(f"pipegrid of {directory}", prepare, sys.executable, https=True)


def _curl(task: Task) -> Call:
    tree = task.place / "tree"
    lines = [
        f'url = "{task.urls[0]}{each.path}"\noutput = "{tree / each.path}"\n'
        for each in task.packages
    ]
    names = task.place / "curl.txt"
    names.write_text("create-dirs\nfail\nsilent\nshow-error\n" + "".join(lines), "utf-8")
    command = ["curl", "--parallel", "--parallel-max", "50", "--config", str(names)]
    if task.authority is not None:
        command += ["--cacert", str(task.authority)]
    return Call(command, tree)


def _wget2(task: Task) -> Call:
    tree = task.place / "tree"
    command = ["wget2", "--quiet", f"--max-threads={AT_ONCE}", "--no-host-directories"]
    command += ["--force-directories", "--directory-prefix", str(tree)]
    command += ["--input-file", str(_urls(task))]
    if task.authority is not None:
        command += ["--ca-certificate", str(task.authority), "--http2=off"]
    return Call(command, tree)


def _aria2(task: Task) -> Call:
    tree = task.place / "tree"
    lines = [f"{task.urls[0]}{each.path}\n  out={each.path}\n" for each in task.packages]
    names = task.place / "aria2.txt"
    names.write_text("".join(lines), "utf-8")
    command = ["aria2c", "--quiet", "--no-conf", "--max-connection-per-server=1"]
    command += [f"--max-concurrent-downloads={AT_ONCE}", "--file-allocation=none"]
    command += ["--dir", str(tree), "--input-file", str(names)]
    if task.authority is not None:
        command += ["--ca-certificate", str(task.authority)]
    return Call(command, tree)


def _urls(task: Task) -> Path:
    names = task.place / "urls.txt"
    names.write_text("".join(f"{task.urls[0]}{each.path}\n" for each in task.packages), "utf-8")
    return names


def _mirror_list(task: Task) -> tuple[Path, Path]:
    base = task.place / "base"
    for name in ("mirror", "skel", "var"):
        (base / name).mkdir(parents=True)
    path = task.place / "mirror.list"
    path.write_text(
        f"set base_path {base}\n"
        f"set defaultarch {ARCHITECTURE}\n"
        f"set nthreads {AT_ONCE}\n"
        "set run_postmirror 0\n"
        "set _tilde 0\n"
        f"deb [arch={ARCHITECTURE}] {task.urls[0].rstrip('/')} {SUITE} {COMPONENT}\n",
        "utf-8",
    )
    return path, base / "mirror" / task.host


def _apt_mirror(task: Task) -> Call:
    path, tree = _mirror_list(task)
    return Call(["apt-mirror", str(path)], tree)


def _apt_mirror2(task: Task) -> Call:
    path, tree = _mirror_list(task)
    return Call([os.environ["APT_MIRROR2"], str(path)], tree)


def _debmirror(task: Task) -> Call:
    tree = task.place / "tree"
    command = ["debmirror", str(tree), "--host", task.host, "--root", "/", "--method", "http"]
    command += ["--dist", SUITE, "--section", COMPONENT, "--arch", ARCHITECTURE, "--nosource"]
    command += ["--no-check-gpg", "--ignore-release-gpg", "--rsync-extra=none", "--diff=none"]
    command += ["--i18n", "--exclude=/Translation-", "--ignore-missing-release", "--slow-cpu"]
    surroundings = os.environ | {"HOME": str(task.place)}
    return Call(command, tree, surroundings)


def _dcs_debmirror(task: Task) -> Call:
    tree = task.place / "tree"
    host = task.host.partition(":")[0]
    return Call([DCS, "-mirrors", f"http://{host}/", "-mirror_path", str(tree)], tree)


TOOLS = (
    Tool(PIPEGRID, pipegrid, sys.executable, https=True),
    Tool(SHARED, lambda task: pipegrid(task, "--jobs", "2"), sys.executable, https=True),
    Tool("curl", _curl, "curl", https=True),
    Tool("wget2", _wget2, "wget2", https=True),
    Tool("aria2", _aria2, "aria2c", https=True),
    Tool("apt-mirror", _apt_mirror, "apt-mirror"),
    Tool(APT_MIRROR2, _apt_mirror2, os.environ.get("APT_MIRROR2", "apt-mirror2")),
    Tool("debmirror", _debmirror, "debmirror", slow=True),
    Tool(DCS, _dcs_debmirror, DCS, port=80),
)

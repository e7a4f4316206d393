"""Who reads repositories: apt and dnf, each with directories of its own."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from misc.mirror_world.case import Case
from misc.mirror_world.packages import run
from misc.mirror_world.signing import public_key


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nobody reads that."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a directory on this machine; the URL of it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def read(case: Case, url: str, key: Path | None = None) -> dict[str, str]:
    """
    Return the packages that apt or dnf gets from there: their hashes by name.

    Args:
        key: public, in text, if it is another one than that of ``signing``.
    """
    with tempfile.TemporaryDirectory(prefix="pg-world-") as home:
        got = Path(home, "got")
        got.mkdir()
        if case.suite:
            _apt(case, url, Path(home), got, key or public_key())
        else:
            _dnf(case, url, Path(home), got, key or public_key())
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in got.rglob("*")
            if path.is_file()
        }


def _apt(case: Case, url: str, home: Path, got: Path, key: Path) -> None:
    for each in (
        "state/lists/partial",
        "cache/archives/partial",
        "etc/preferences.d",
        "etc/trusted.gpg.d",
    ):
        (home / each).mkdir(parents=True)
    (home / "status").write_text("")
    words = " ".join((case.suite, *case.components))
    trust = f"signed-by={key}" if case.is_signed else "trusted=yes"
    (home / "sources").write_text(f"deb [{trust} arch=amd64] {url} {words}\n")
    settings = (
        f"Dir::State={home}/state",
        f"Dir::State::status={home}/status",
        f"Dir::Cache={home}/cache",
        f"Dir::Etc={home}/etc",
        f"Dir::Etc::sourcelist={home}/sources",
        "Dir::Etc::sourceparts=/dev/null",
        "Dir::Etc::main=/dev/null",
        "Dir::Etc::parts=/dev/null",
        "APT::Architecture=amd64",
        "APT::Architectures::=amd64",
        "APT::Sandbox::User=root",
        "APT::Update::Error-Mode=any",
        "Acquire::Languages=none",
        "Acquire::http::Proxy=false",
    )
    options = [word for each in settings for word in ("-o", each)]
    run("apt-get", *options, "update")
    names = run("apt-cache", *options, "pkgnames").decode().split()
    if not names:
        raise RuntimeError(f"apt finds no packages at {url}")
    run("apt-get", *options, "download", *names, cwd=got)


def _dnf(case: Case, url: str, home: Path, got: Path, key: Path) -> None:
    (home / "repos").mkdir()
    trust = "gpgcheck=0\n"
    if case.is_signed:
        trust = f"gpgcheck=1\nrepo_gpgcheck=1\ngpgkey=file://{key}\n"
    (home / "dnf.conf").write_text(
        f"[main]\nassumeyes=1\ncachedir={home}/cache\nreposdir={home}/repos\nlogdir={home}\n"
        f"persistdir={home}/state\n[pg]\nname=pg\nbaseurl={url}\n{trust}"
    )
    dnf = ("dnf", "--config", f"{home}/dnf.conf", f"--installroot={home}/root", "--releasever=1")
    further = ("--setopt=module_platform_id=platform:x",)
    run(*dnf, *further, "makecache", home=home)
    checks: tuple[str, ...] = ()
    if case.is_signed:
        run("rpmkeys", f"--root={home}/root", "--import", str(key), home=home)
        checks = ("--gpgcheck",)
    run(*dnf, *further, "reposync", *checks, f"--download-path={got}", home=home)
    if not any(got.rglob("*.rpm")):
        raise RuntimeError(f"dnf finds no packages at {url}")

"""
Real web servers: nginx, one process with one worker each, on loopback ports that the system chooses.

Files are sent with ``sendfile``, keep-alive ends after nginx's own 1000 requests, and nothing is logged. A
server can lack files or have them wrong (``damaged``), answer 503, send slowly, stall, and die.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs

from misc.speedtest.mirror.authority import Certificate
from misc.speedtest.processes import LOOPBACK, cpu_s

START_S = 20.0

_CONFIGURATION = """\
{user}daemon off;
worker_processes 1;
pid {place}/pid;
error_log {place}/error.log error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    tcp_nodelay on;
    default_type application/octet-stream;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
{busy_map}    server {{
        listen {host}:{port}{listen};
{tls}        root {root};
{behaviour}    }}
}}
"""


@attrs.frozen
class Behaviour:
    """
    How a server misbehaves.

    Attributes:
        busy_percent: of the requests are answered with 503.
        bytes_per_s: of each answer, at most; None: as fast as it can.
        keepalive_requests: after so many it closes the connection.
        redirects_to: where it redirects each request, with nginx's variables; None: it does not.
        strips: an end of paths that it takes for nothing.
        authorization: what requests must have as that; others are refused. "": they must not have any.
        client: what nginx must find of their certificates, such as SUCCESS or NONE; others are refused.
        further: what its configuration says besides.
    """

    busy_percent: int = 0
    bytes_per_s: int | None = None
    keepalive_requests: int = 1000
    redirects_to: str | None = None
    strips: str | None = None
    authorization: str | None = None
    client: str | None = None
    further: str = ""


class WebServer:
    """
    One nginx, while this is entered.

    Args:
        root: what it serves.
        place: where its own files are; made.
        certificate: for HTTPS (TLS 1.3); None: plain HTTP.
    """

    def __init__(
        self,
        root: Path,
        place: Path,
        behaviour: Behaviour | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self._root = root
        self._place = place
        self._behaviour = behaviour or Behaviour()
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{LOOPBACK}:{self.port}"

    def __enter__(self) -> WebServer:
        self._place.mkdir(parents=True)
        self.port = _free_port()
        configuration = self._place / "nginx.conf"
        configuration.write_text(self._configuration(), "utf-8")
        self._process = subprocess.Popen(
            [
                nginx(),
                "-p",
                str(self._place),
                "-e",
                str(self._place / "error.log"),
                "-c",
                str(configuration),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its workers can be told apart, and told to stop
        )
        self._wait_until_it_answers()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stall(False)
        self.kill()

    def kill(self) -> None:
        """End it now, with all its connections."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stall(self, stalls: bool = True) -> None:
        """Have it do nothing, with all its connections open; or go on."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP if stalls else signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the CPU time that its worker has used."""
        if self._process is None:
            return 0.0
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(cpu_s(int(child)) for child in children)

    def _configuration(self) -> str:
        behaviour = self._behaviour
        inside = f"        keepalive_requests {behaviour.keepalive_requests};\n"
        busy_map = ""
        if behaviour.bytes_per_s is not None:
            inside += f"        limit_rate {behaviour.bytes_per_s};\n"
        if behaviour.authorization is not None:
            wanted = behaviour.authorization
            inside += f'        if ($http_authorization != "{wanted}") {{ return 401; }}\n'
        if behaviour.client is not None:
            inside += f'        if ($ssl_client_verify != "{behaviour.client}") {{ return 403; }}\n'
        inside += behaviour.further
        if behaviour.redirects_to is not None:
            inside += f"        return 302 {behaviour.redirects_to};\n"
        if behaviour.strips is not None:
            end = behaviour.strips.replace(".", "\\.")
            inside += f"        location ~ ^(.*){end}$ {{ try_files $1 =404; }}\n"
        if behaviour.busy_percent:
            busy_map = (
                f'    split_clients $request_id $busy {{ {behaviour.busy_percent}% 1; * ""; }}\n'
            )
            inside += "        if ($busy) { return 503; }\n"
        tls = ""
        if self._certificate is not None:
            tls = (
                f"        ssl_certificate {self._certificate.certificate};\n"
                f"        ssl_certificate_key {self._certificate.key};\n"
                "        ssl_protocols TLSv1.3;\n"
            )
            if behaviour.client is not None:
                tls += f"        ssl_client_certificate {self._certificate.authority};\n"
                tls += "        ssl_verify_client optional;\n"
        return _CONFIGURATION.format(
            user="user root;\n" if os.geteuid() == 0 else "",
            place=self._place,
            busy_map=busy_map,
            host=LOOPBACK,
            port=self.port,
            listen="" if self._certificate is None else " ssl",
            tls=tls,
            root=self._root,
            behaviour=inside,
        )

    def _wait_until_it_answers(self) -> None:
        ends = time.monotonic() + START_S
        while not self._answers():
            assert self._process is not None
            if time.monotonic() > ends or self._process.poll() is not None:
                told = (self._place / "error.log").read_text("utf-8", "replace")
                self.kill()
                raise RuntimeError(f"nginx did not start: {told}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            socket.create_connection((LOOPBACK, self.port), timeout=1).close()
        except OSError:
            return False
        return True


def nginx() -> str:
    """Return where nginx is; Debian has it where only root looks."""
    for directory in (*os.get_exec_path(), "/usr/sbin"):
        path = Path(directory) / "nginx"
        if path.is_file():
            return str(path)
    raise RuntimeError("there is no nginx; `make mirror` installs it")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def damaged(
    root: Path, place: Path, missing: list[str], garbled: list[str], cut: list[str]
) -> Path:
    """
    Make another mirror of an archive, of hard links, in which some files are missing or wrong.

    Args:
        garbled: have as many bytes, but others. cut: have fewer.
    """
    absent = frozenset(missing)
    changed = dict.fromkeys(garbled, False) | dict.fromkeys(cut, True)
    for path in root.rglob("*"):
        relative = path.relative_to(root).as_posix()
        if path.is_dir() or relative in absent:
            continue
        target = place / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shorter = changed.get(relative)
        if shorter is None:
            os.link(path, target)
            continue
        data = path.read_bytes()
        target.write_bytes(data[: len(data) // 2] if shorter else data[:-1] + bytes([data[-1] ^ 1]))
    return place

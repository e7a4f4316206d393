"""
Replays the recorded conversations of ``vectors/webapi.json`` with a gateway.

    python -m tests.gateway.webapi_replay http://127.0.0.1:3456/ NODEDIR [SEQUENCE...]
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote, unquote, urljoin

import attrs

from tests import vectors

TIMEOUT_S = 120.0
_NAME = re.compile(r"\$\{(q:)?([a-z_0-9]+)\}")
_TYPES: dict[str, tuple[type, ...]] = {
    "$int": (int,),
    "$float": (float,),
    "$number": (int, float),
    "$string": (str,),
    "$bool": (bool,),
    "$list": (list,),
    "$dict": (dict,),
    "$any": (object,),
}

DeleteShares = Callable[[str, int], None]


@attrs.frozen
class Answer:
    """What a gateway answered."""

    status: int
    headers: dict[str, str]
    body: bytes


@attrs.frozen
class Mismatch:
    """One step whose answer was not as recorded."""

    sequence: str
    step: int
    level: str
    request: str
    why: str

    def __str__(self) -> str:
        return f"{self.sequence}[{self.step}] ({self.level}) {self.request}: {self.why}"


class Replay:
    """
    One gateway, and the names that steps have bound.

    Args:
        url: of the gateway.
        token: what ``private/api_auth_token`` has.
        delete_shares: deletes all shares of a storage index but those with the lowest numbers.
    """

    def __init__(self, url: str, token: str, run: str, delete_shares: DeleteShares) -> None:
        self._base = url.rstrip("/")
        host = self._base.removeprefix("http://")
        self._start = {"base": self._base, "host": host, "run": run, "api_auth_token": token}
        self._names = dict(self._start)
        self._host = host
        self._delete_shares = delete_shares

    def play(self, sequence: dict[str, Any]) -> Iterator[Mismatch]:
        """Send the steps of a sequence; yields what differs."""
        self._names = dict(self._start)
        for number, step in enumerate(sequence["steps"]):
            level = step.get("level", sequence["level"])
            try:
                self._play_step(step)
            except Exception as error:
                request = step.get("request") or {}
                shown = f"{request.get('method')} {request.get('path')}"
                why = str(error) if isinstance(error, AssertionError) else repr(error)
                yield Mismatch(sequence["name"], number, level, shown, why[:600])

    def _play_step(self, step: dict[str, Any]) -> None:
        if "grid" in step:
            given = self._filled(step["grid"])
            self._delete_shares(given["storage_index"], given["keep"])
        elif "parallel" in step:
            found: list[Answer] = []
            threads = [
                Thread(target=lambda each=each: found.append(self._send(each)))
                for each in step["parallel"]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            statuses = [answer.status for answer in found]
            assert statuses == [step["response"]["status"]] * len(threads), statuses
        else:
            answer = self._ask(step)
            for bind in step.get("bind", ()):
                self._names[bind["name"]] = self._bound(bind, answer)
            self._compare(step["response"], answer, step["request"]["path"])

    def _ask(self, step: dict[str, Any]) -> Answer:
        until = step.get("until")
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._send(step["request"])
            if until is None or time.monotonic() > deadline_s:
                return answer
            value = json.loads(answer.body)
            for part in until["path"]:
                value = value[part]
            if value == until["equals"]:
                return answer
            time.sleep(0.2)

    def _send(self, request: dict[str, Any]) -> Answer:
        connection = HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            connection.putrequest(
                request["method"], self._filled(request["path"]), skip_accept_encoding=True
            )
            for name, value in request.get("headers", {}).items():
                connection.putheader(name, self._filled(value))
            body = self._body(request.get("body"))
            if request.get("chunked"):
                connection.putheader("Transfer-Encoding", "chunked")
                body = _chunked(body or b"")
            elif body is not None or request["method"] in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(body or b"")))
            connection.endheaders(body)
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())
        finally:
            connection.close()

    def _body(self, given: dict[str, Any] | None) -> bytes | None:
        if given is None:
            return None
        if "text" in given:
            return str(self._filled(given["text"])).encode()
        if "base64" in given:
            return base64.b64decode(given["base64"])
        if "json" in given:
            return json.dumps(self._filled(given["json"])).encode()
        return vectors.plaintext(given)

    def _filled(self, value: Any) -> Any:
        """Return a value with the names in its strings replaced."""
        if isinstance(value, str):
            return _NAME.sub(
                lambda m: quote(self._names[m[2]], safe="") if m[1] else self._names[m[2]], value
            )
        if isinstance(value, list):
            return [self._filled(each) for each in value]
        if isinstance(value, dict):
            return {self._filled(key): self._filled(each) for key, each in value.items()}
        return value

    def _bound(self, bind: dict[str, Any], answer: Answer) -> str:
        kind = bind["from"]
        text = answer.body.decode("utf-8", "replace")
        if kind.startswith("header:"):
            text = answer.headers.get(kind.removeprefix("header:").lower(), "")
        elif kind in ("json", "line"):
            value = json.loads(text.splitlines()[bind["line"]] if kind == "line" else text)
            for part in self._filled(bind.get("path", [])):
                value = value[part]
            text = value
        if bind.get("unquote"):
            text = unquote(text)
        match = re.search(bind.get("pattern", "(?s).*"), text)
        assert match is not None, f"{bind['name']} is not in {text[:300]!r} ({answer.status})"
        return match[1] if match.groups() else match[0]

    def _compare(self, expected: dict[str, Any], answer: Answer, path: str) -> None:
        statuses = expected["status"]
        statuses = statuses if isinstance(statuses, list) else [statuses]
        said = answer.body[:300].decode("utf-8", "replace")
        assert answer.status in statuses, f"status {answer.status}, not {statuses}: {said}"
        for name, value in expected.get("headers", {}).items():
            found = answer.headers.get(name.lower())
            assert found is not None, f"no header {name}"
            wanted = self._filled(value)
            found, wanted = self._comparable(name.lower(), found, wanted, path)
            assert found == wanted, f"{name} is {found!r}, not {wanted!r}"
        for name in expected.get("no_headers", ()):
            assert name.lower() not in answer.headers, f"header {name} is there"
        self._compare_body(expected.get("body", {"any": True}), answer.body)

    def _comparable(self, name: str, found: str, wanted: str, path: str) -> tuple[str, str]:
        if name == "content-type":
            return found.lower(), wanted.lower()
        if name == "etag":
            return found.strip('"'), wanted.strip('"')
        if name == "location":
            base = urljoin(self._base + "/", self._filled(path))
            return unquote(urljoin(base, found)), unquote(urljoin(base, wanted))
        return found, wanted

    def _compare_body(self, expected: dict[str, Any], body: bytes) -> None:
        shown = body[:400].decode("utf-8", "replace")
        text = body.decode("utf-8", "replace")
        if "text" in expected:
            wanted = self._filled(expected["text"])
            assert text == wanted, f"body {shown!r}, not {wanted[:200]!r}"
        elif "base64" in expected:
            assert body == base64.b64decode(expected["base64"]), f"body {shown!r}"
        elif "sha256" in expected:
            digest = hashlib.sha256(body).hexdigest()
            assert (digest, len(body)) == (expected["sha256"], expected["length"]), f"{shown!r}"
        elif "contains" in expected:
            for each in self._filled(expected["contains"]):
                assert each in text, f"{each!r} is not in {shown!r}"
        elif "regex" in expected:
            pattern = self._filled(expected["regex"])
            assert re.fullmatch(pattern, text, re.DOTALL), f"body {shown!r} is not {pattern!r}"
        elif "json" in expected:
            _match(json.loads(text), self._filled(expected["json"]), "$")
        elif "json_lines" in expected:
            assert text.endswith("\n"), "the last line does not end"
            lines = [json.loads(line) for line in text.splitlines()]
            _match(lines, self._filled(expected["json_lines"]), "$")


def _match(found: Any, wanted: Any, where: str) -> None:
    """Compare JSON with a template; see ``vectors/README.md``."""
    if isinstance(wanted, str) and wanted in _TYPES:
        assert isinstance(found, _TYPES[wanted]), f"{where} is {found!r}, not {wanted}"
    elif isinstance(wanted, str) and wanted.startswith("$re:"):
        assert re.fullmatch(wanted[4:], found), f"{where} is {found!r}, not {wanted}"
    elif isinstance(wanted, dict) and "$unordered" in wanted:
        _match_unordered(found, wanted["$unordered"], where)
    elif isinstance(wanted, dict):
        inner = wanted.get("$open", wanted)
        missing = inner.keys() - found.keys()
        extra = set() if "$open" in wanted else found.keys() - inner.keys()
        assert not (missing | extra), f"{where}: missing {missing}, extra {extra}"
        for key, value in inner.items():
            _match(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(found, list), f"{where} is {found!r}"
        assert len(found) == len(wanted), f"{where} has {len(found)}, not {len(wanted)}: {found!r}"
        for number, (each, value) in enumerate(zip(found, wanted, strict=True)):
            _match(each, value, f"{where}[{number}]")
    else:
        same = (found, type(found)) == (wanted, type(wanted))
        assert same, f"{where} is {found!r}, not {wanted!r}"


def _match_unordered(found: Any, wanted: list[Any], where: str) -> None:
    left = list(found)
    assert len(left) == len(wanted), f"{where} has {len(left)}, not {len(wanted)}: {found!r}"
    for value in wanted:
        for each in left:
            try:
                _match(each, value, where)
            except (AssertionError, TypeError, AttributeError):
                continue
            left.remove(each)
            break
        else:
            raise AssertionError(f"{where}: nothing is like {value!r}: {left!r}")


def _chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def delete_shares_below(storage: Path) -> DeleteShares:
    """Return what deletes shares of an embedded grid, or of servers below one directory."""

    def delete(index: str, keep: int) -> None:
        found = sorted(
            (int(path.name), path)
            for path in storage.glob(f"**/shares/{index[:2]}/{index}/*")
            if path.name.isdigit()
        )
        assert found, f"no shares of {index}"
        kept = sorted({number for number, _ in found})[:keep]
        for number, path in found:
            if number not in kept:
                path.unlink()

    return delete


def sequences() -> list[dict[str, Any]]:
    """Return all that was recorded."""
    return list(vectors.load("webapi")["sequences"])


def main(url: str, node: str, *chosen: str) -> int:
    """Replay some sequences, or all; prints what differs."""
    token = (Path(node) / "private/api_auth_token").read_text().strip()
    replay = Replay(url, token, f"{time.time_ns():x}", delete_shares_below(Path(node)))
    bad = 0
    for sequence in sequences():
        if not chosen or sequence["name"] in chosen:
            for mismatch in replay.play(sequence):
                quirk = mismatch.level == "quirk"
                bad += not quirk
                if not quirk or chosen:
                    print(mismatch, flush=True)
    print(f"{bad} steps differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

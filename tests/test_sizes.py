"""A module has 60 to 800 lines of code, a function at most 60 lines; run it to see which have more."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

PACKAGE = Path(__file__).parent.parent / "src" / "pipegrid"

MOST_CODE_LINES = 800
"""Without docstrings, comments and blank lines."""

LEAST_CODE_LINES = 60
"""A smaller module needs a reason."""

_EARLY = "loaded alone at start-up"
_CONTRACT = "one contract, standard or table, which many import"

SMALL = {
    "argument_checks.py": _CONTRACT,
    "state_table.py": _CONTRACT,
    "version.py": _EARLY,
    "cli/backup_metrics.py": "brings Prometheus's library, which few backups need",
    "cli/mirror_verify.py": "work of one command, loaded alone",
    "cli/output_file.py": "one option, loaded only when it is given",
    "cli/startup/fast_json_encoder.py": _EARLY,
    "cli/startup/fast_mirror_verify.py": _EARLY,
    "cli/startup/preconnect_servers.py": _EARLY,
    "cli/twist_gateway.py": "brings the libraries of the gateway, which storage servers do not need",
    "core/base32.py": _CONTRACT,
    "core/stream_cipher.py": "brings OpenSSL's cipher, which only some transfers need",
    "core/clamped_dates.py": _CONTRACT,
    "disk/mount_table.py": "one list, for walks and for mounts",
    "disk/sqlite_databases.py": "brings SQLite, which only backups and some mirrors need",
    "grid/access_blacklist.py": "loaded by gateways alone",
    "grid/user_grids.py": "loaded only with --grid",
    "gateway/request_origin.py": "pure decisions, apart from the server that asks for them",
    "http11/connection_limits.py": _CONTRACT,
    "http11/pinned_endpoints.py": "brings twisted.web, which storage clients do not need",
    "speedtest/end_with_parent.py": "run with python -m",
    "storage/storage_paths.py": _CONTRACT,
    "transfer/server_space.py": "loaded only when shares could be spread over more servers",
    "transfer/put/source_opening.py": "brings twisted.web only for sources that need it",
    "transfer/settings.py": "read by the options of commands, before any transfer",
}
"""Modules below that, with the reason of each; at most 30."""

MOST_FUNCTION_LINES = 60
"""From ``def`` to the end, what its docstring says included; decorators are not."""


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Count the lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """Yield the name and the lines of each function, of methods and inner ones, too."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}.{node.name}" if inside else node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, (node.end_lineno or node.lineno) - node.lineno + 1
        yield from functions(node, name)


def too_long() -> dict[str, list[str]]:
    """Return what is longer than it may be, by the module that it is in, in words."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        here = [
            f"{name}, {lines} lines"
            for name, lines in functions(ast.parse(text))
            if lines > MOST_FUNCTION_LINES
        ]
        if code_lines(text) > MOST_CODE_LINES:
            here.insert(0, f"{code_lines(text)} lines of code")
        if here:
            found[path.relative_to(PACKAGE).as_posix()] = here
    return found


class SizesTests(SynchronousTestCase):
    """What is cut along ideas is short."""

    def test_modules_and_functions_are_short(self) -> None:
        """Every one of them."""
        self.assertEqual(too_long(), {})

    def test_small_modules_have_a_reason(self) -> None:
        """Each of them is in the table, and nothing else is."""
        small = {
            path.relative_to(PACKAGE).as_posix()
            for path in PACKAGE.rglob("*.py")
            if not path.name.startswith("__")
            and code_lines(path.read_text("utf-8")) < LEAST_CODE_LINES
        }
        self.assertEqual(small - SMALL.keys(), set(), "merge it, or give a reason")
        self.assertEqual(SMALL.keys() - small, set(), "it is gone, or larger by now")
        self.assertLessEqual(len(SMALL), 30)

    def test_only_code_is_counted(self) -> None:
        """Docstrings, comments and blank lines are not."""
        text = '"""Doc."""\n\n# why\nX = 1\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
        self.assertEqual(code_lines(text), 4)

    def test_functions_are_found(self) -> None:
        """Methods and inner functions count, decorators do not."""
        text = "class A:\n    @x\n    def b(self):\n        def c():\n            pass\n\ndef d(): ...\n"
        self.assertEqual(
            dict(functions(ast.parse(text))),
            {"A.b": 3, "A.b.c": 2, "d": 1},
        )


if __name__ == "__main__":
    for module, lines in sorted(too_long().items()):
        print(f"{module}: {'; '.join(lines)}")

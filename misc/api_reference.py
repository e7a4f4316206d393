"""
The page of the library's public names, ``docs/reference-api.md``, from their signatures and docstrings.

``python -m misc.api_reference > docs/reference-api.md``; a test says when that is to be done.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

import pipegrid
import pipegrid.http11

INTRODUCTION = """\
# The library's public names

This page is generated from signatures and docstrings: `python -m misc.api_reference`. How to use them:
[the grid](how-to-library.md), [Pipeline](how-to-pipeline.md), [PipelinedAgent](how-to-pipelined-agent.md),
[Mirror](how-to-mirror.md), [Buildbot](how-to-buildbot.md), [simulation](explanation-simulation.md).

**What is promised.** The names on this page stay, with their arguments, units, and the classes of the
errors they raise. New arguments are optional and named. What is to go warns first (`DeprecationWarning`), for
two minor releases at least. Everything else may change at any time. Sizes are bytes, times are seconds,
unless a name says otherwise (`_ms`). What a Deferred fails with is listed under *Raises (through the
Deferred)*.
"""

SECTIONS = (
    ("pipegrid", "the grid, its errors, pipelines and mirrors", tuple(pipegrid.__all__)),
    ("pipegrid.http11", "pipelined HTTP", tuple(pipegrid.http11.__all__)),
    ("pipegrid.flow.pipeline", "what a Pipeline can be given and can say", ("UNDELIVERED",)),
    ("pipegrid.flow.window", "windows of a Pipeline", ("FixedWindow", "Window")),
    ("pipegrid.transfer.settings", "what a grid may take", ("Limits",)),
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for module_name, about, names in SECTIONS:
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}: {about}\n")
        for name in sorted(names, key=str.lower):
            parts.extend(_entry(name, getattr(module, name)))
    parts.extend(_buildbot_step())
    return "\n".join(parts).rstrip() + "\n"


def _buildbot_step() -> Iterator[str]:
    """Yield the entry of what needs Buildbot to be imported, from its source."""
    source = Path(pipegrid.__file__).parent / "buildbot.py"
    kind = next(
        node
        for node in ast.parse(source.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "SpeedTest"
    )
    yield "## pipegrid.buildbot: a step of Buildbot, which has to be installed\n"
    yield "### SpeedTest\n"
    yield _as_markdown(inspect.cleandoc(ast.get_docstring(kind) or ""))
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield f"```text\nSpeedTest({ast.unparse(node.args).removeprefix('self, ')})\n```\n"
            yield _as_markdown(ast.get_docstring(node) or "")


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isclass(value):
        yield from _class(name, value)
    elif callable(value) and hasattr(value, "__name__"):
        yield f"```text\n{name}{_signature(value)}\n```\n"
        yield from _docstring(value)
    elif name == "__version__":
        yield "The version, as text.\n"
    elif name == "Cap":
        yield "Any capability: the type for annotations.\n"
    elif name == "UNDELIVERED":
        yield (
            "What a call fires with that was not acknowledged, and does not want to stop the pipeline.\n"
        )
    else:
        raise ValueError(f"nothing is known of {name}; say here what it is")


def _class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if base is not object]
    yield f"```text\nclass {name}{_signature(kind)}\n```\n"
    if issubclass(kind, BaseException):
        yield f"A kind of `{bases[0]}`.\n"
    yield from _docstring(kind)
    initialiser = vars(kind).get("__init__")
    if initialiser is not None and not attrs.has(kind):
        yield from _docstring(initialiser)
    for member in sorted(dir(kind)):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(kind, member)
        if issubclass(kind, BaseException) and member not in vars(kind):
            continue
        yield from _member(member, found)


def _member(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, property):
        text = inspect.getdoc(found)
        if text:
            yield f"`{name}` (property)\n"
            yield from _docstring(found)
        return
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if inspect.isfunction(found) and inspect.getdoc(found):
        yield f"```text\n{name}{_signature(found)}\n```\n"
        yield from _docstring(found)


def _signature(value: Any) -> str:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return _ADDRESS.sub(
        "", signature.replace("'", "").replace("(self, ", "(").replace("(self)", "()")
    )


def _docstring(value: Any) -> Iterator[str]:
    text = inspect.getdoc(value)
    if text:
        yield _as_markdown(text)


def _as_markdown(text: str) -> str:
    """Return a docstring as Markdown: what is indented below a heading such as ``Args:`` becomes a list."""
    lines: list[str] = []
    section = False
    for line in text.replace("``", "`").splitlines():
        if re.fullmatch(r"(Args|Attributes|Returns|Raises.*):", line):
            section = True
            lines += ["", f"*{line[:-1]}*", ""]
        elif section and re.match(r"    \S", line):
            lines.append(f"* {line.strip()}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section and not line
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


if __name__ == "__main__":
    print(page(), end="")

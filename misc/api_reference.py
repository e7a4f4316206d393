"""
The pages of the library's public names, ``docs/reference-api*.md``, from their signatures and docstrings.

``python -m misc.api_reference --write``; without it the first page is printed. A test says when they are
not current.

An entry has the signature without types, the first sentence of the docstring, and that of each item of its
lists (*Args*, *Raises* and such); the source has the rest. What a class implements of another public one, or
of one of Twisted's, is listed once. Classes that the HTTP client is made of have signatures only, and few
have members.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

import pipegrid
import pipegrid.http11
from pipegrid.flow.window import Window

DOCS = Path(__file__).resolve().parent.parent / "docs"

INTRODUCTION = """\
# The library's public names

Generated from signatures and docstrings: `python -m misc.api_reference --write`. The types are in the
source. Further pages: [Grid and Directory](reference-api-grid.md),
[pipelines, mirrors and the Buildbot step](reference-api-pipeline.md),
[pipegrid.http11](reference-api-http11.md),
[pipegrid.testing](reference-api-testing.md). How to use them: [the library](how-to-library.md).

**What is promised.** The names on these pages stay, with their arguments, units, and the classes of the
errors they raise. New arguments are optional and named. A name that will be removed warns first
(`DeprecationWarning`), for two minor releases at least. Everything else may change at any time. Sizes are
bytes, times are seconds, unless a name says otherwise (`_ms`). *Fails with* lists what a Deferred fails
with, *Raises* what is raised at once. The entry of an error begins with the class that it is a kind of.
"""

HTTP_INTRODUCTION = """\
# The public names of pipegrid.http11

Generated, with the promise of [the other one](reference-api.md). How to use them:
[pipeline HTTP requests](how-to-pipelined-agent.md).
"""

GRID_INTRODUCTION = """\
# The public names Grid and Directory

Generated, with the promise of [the first one](reference-api.md). How to use them: [the
library](how-to-library.md).
"""

PIPELINE_INTRODUCTION = """\
# The public names of pipelines, mirrors and the Buildbot step

Generated, with the promise of [the first one](reference-api.md). How to use them:
[Pipeline](how-to-pipeline.md), [Mirror](how-to-mirror.md), [Buildbot](how-to-buildbot.md).
"""

TESTING_INTRODUCTION = """\
# The public names of pipegrid.testing

Generated, with the promise of [the first one](reference-api.md). How to use them: [test a
program that uses a grid](how-to-test-programs.md).
"""

GRID = ("Directory", "Grid", "create_local")
PIPELINES = ("AutoWindow", "Mirror", "Pipeline", "PipelineStopped", "RemoteCallError")
HTTP = tuple(pipegrid.http11.__all__)
REST = tuple(name for name in pipegrid.__all__ if name not in (*GRID, *PIPELINES, *HTTP))

PAGES: dict[str, tuple[str, tuple[tuple[str, str, tuple[str, ...]], ...]]] = {
    "reference-api.md": (
        INTRODUCTION,
        (
            ("pipegrid", "caps, results and errors", REST),
            ("pipegrid.transfer.settings", "what a grid may take", ("Limits",)),
        ),
    ),
    "reference-api-grid.md": (GRID_INTRODUCTION, (("pipegrid", "the grid", GRID),)),
    "reference-api-pipeline.md": (
        PIPELINE_INTRODUCTION,
        (
            ("pipegrid", "pipelines and mirrors", PIPELINES),
            (
                "pipegrid.flow.pipeline",
                "what a Pipeline can be given and can report",
                ("UNDELIVERED",),
            ),
            ("pipegrid.flow.window", "windows of a Pipeline", ("FixedWindow", "Window")),
        ),
    ),
    "reference-api-http11.md": (
        HTTP_INTRODUCTION,
        (("pipegrid.http11", "pipelined HTTP", HTTP),),
    ),
    "reference-api-testing.md": (
        TESTING_INTRODUCTION,
        (
            ("pipegrid.testing.grid", "a grid", ("SimulatedGrid", "SimulatedServer")),
            (
                "pipegrid.testing.network",
                "a network",
                ("Hung", "SimulatedNetwork", "leaks", "run"),
            ),
            ("pipegrid.testing.clock", "virtual time", ("HeapClock", "cooperator")),
            (
                "pipegrid.testing.fault_plan",
                "faults",
                ("Crash", "Cut", "FaultPlan", "Partition", "Refuse", "Slow", "Stall", "shrink"),
            ),
        ),
    ),
}
"""Each page's introduction and sections: a module, what it has, and names in it."""

CONTRACTS = {"AutoWindow": Window, "FixedWindow": Window}
"""Whose methods a class has, without a class of Python's above it."""
NOT_CALLED = {"Grid": "It is made by `Grid.open` or `Grid.create_local`."}
"""Classes whose constructor applications do not call; nor do they make any result."""
EVENTS = ("Crash", "Cut", "Partition", "Refuse", "Slow", "Stall")
"""What a `FaultPlan` has, with one method, which the plan has as well."""
INTERNAL = {
    "Grid": {
        "add_warning",
        "known_content",
        "lease_releaser",
        "reading_a_tree",
        "storing_lock",
        "upkeep",
        "workers",
    },
    "Mirror": {"fetch_small", "finish", "run"},
    "SimulatedNetwork": {
        *("at", "later", "make_pair", "note", "now_ns", "offer", "owns", "pass_through", "soon"),
    },
    "SimulatedServer": {"make_disk", "make_front", "make_store"},
}
"""Members by which PipeGrid's own parts work together; what they take or return is not public."""

PARTS = frozenset(
    {
        "Exchange",
        "HostPool",
        "Loss",
        "Owner",
        "PipelinedConnection",
        "ProxyEndpoints",
        "RawExchange",
        "RawRequest",
        "RawResponse",
        "StandardEndpoints",
    }
)
"""Of which the HTTP client is made; programs that use one read its source."""
USED = ("HostPool", "PipelinedConnection")
"""Those of them whose members a program calls that sends raw requests."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CLASS = re.compile(r"<class '[\w.]*?(\w+)'>")
_FUNCTION = re.compile(r"<(?:function|built-in function) [\w.<>]+>")
_LIST = re.compile(r"(Args|Attributes|Returns|Raises.*):")


def pages() -> dict[str, str]:
    """Return the text of each page, by its name in ``docs/``."""
    return {name: page(name) for name in PAGES}


def page(name: str) -> str:
    """Return one page."""
    introduction, sections = PAGES[name]
    parts = [introduction]
    for module_name, about, names in sections:
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}: {about}\n")
        for each in sorted(names, key=str.lower):
            parts.extend(_entry(each, getattr(module, each)))
    if name == "reference-api-pipeline.md":
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
    yield _short(inspect.cleandoc(ast.get_docstring(kind) or ""))
    for node in kind.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for each in (*node.args.args, *node.args.kwonlyargs):
                each.annotation = None
            yield f"`SpeedTest({ast.unparse(node.args).removeprefix('self, ')})`\n"
            yield _short(ast.get_docstring(node) or "")


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isclass(value):
        yield from _class(name, value)
    elif callable(value) and hasattr(value, "__name__"):
        yield f"`{name}{_signature(value)}`\n"
        yield _short(inspect.getdoc(value) or "")
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
    base = next(each.__name__ for each in kind.__mro__[1:] if not each.__name__.startswith("_"))
    lists = name not in PARTS
    error = issubclass(kind, BaseException)
    if not error and name not in NOT_CALLED and not name.endswith("Result"):
        yield f"`{name}{_signature(kind)}`\n"
    initialiser = vars(kind).get("__init__")
    constructed = inspect.cleandoc(getattr(initialiser, "__doc__", None) or "")
    if attrs.has(kind):
        constructed = ""  # attrs wrote it
    sentences = [
        f"`{base}`:" if error else "",
        _short(inspect.getdoc(kind) or "", lists).strip(),
        _short(constructed, lists).strip(),
        NOT_CALLED.get(name, ""),
    ]
    if name.endswith("Result") and attrs.has(kind):
        told = " ".join(sentences)
        others = [f"`{each.name}`" for each in attrs.fields(kind) if f"`{each.name}`" not in told]
        sentences.append(f"Also {', '.join(others)}." if others else "")
    contract = CONTRACTS.get(name)
    inherited = [base for base in kind.__mro__ if base.__module__.startswith("twisted.")]
    if contract is not None:
        sentences.append(f"It has all that `{contract.__name__}` has.")
    if inherited:
        sentences.append(f"It has all that Twisted's `{inherited[0].__name__}` has.")
    yield " ".join(each for each in sentences if each) + "\n"
    for member in sorted(dir(kind)) if lists or name in USED else ():
        if member.startswith("_") or (contract is not None and hasattr(contract, member)):
            continue
        if any(hasattr(base, member) for base in inherited):
            continue
        if name in EVENTS or member in INTERNAL.get(name, ()):
            continue
        found = inspect.getattr_static(kind, member)
        if error and member not in vars(kind):
            continue
        yield from _member(member, found, lists)


def _member(name: str, found: Any, lists: bool) -> Iterator[str]:
    if isinstance(found, property):
        if inspect.getdoc(found):
            text = f": {_short(inspect.getdoc(found) or '')}" if lists else "\n"
            yield f"`{name}`{text}"
        return
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if inspect.isfunction(found) and inspect.getdoc(found):
        text = f": {_short(inspect.getdoc(found) or '')}" if lists else "\n"
        yield f"`{name}{_signature(found)}`{text}"


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Signature.empty
    parameters = [
        each.replace(annotation=empty)
        for number, each in enumerate(signature.parameters.values())
        if number or each.name not in ("self", "cls")
    ]
    returned = signature.return_annotation
    if inspect.isclass(value) or returned in ("None", None):
        returned = empty
    short = str(signature.replace(parameters=parameters, return_annotation=empty))
    if returned is not empty:
        short += f" -> {returned}".replace("'", "")
    return _FUNCTION.sub("…", _CLASS.sub(r"\1", _ADDRESS.sub("", short)))


def _short(text: str, lists: bool = True) -> str:
    """Return the first sentence of a docstring, and of each item of its lists, as Markdown."""
    parts = re.split(r"\n\s*\n(?! )", text)
    found = [] if _LIST.match(text) else [_sentence(re.split(r"\n\s*\n", parts.pop(0))[0])]
    for each in parts if lists else ():
        heading = _LIST.match(each)
        if heading is not None:
            items = re.split(r"\n    (?=\S)", each[heading.end() :])
            title = "Fails with" if "Deferred" in heading[1] else heading[1]
            found.append(f"*{title}:* " + " ".join(filter(None, map(_sentence, items))))
    return "\n\n".join(found).replace("``", "`") + "\n"


def _sentence(text: str) -> str:
    """Return the first sentence of a text, on one line; the name before a colon is code."""
    line = re.sub(r"^([*\w]+(?:, [*\w]+)*): ", r"`\1`: ", " ".join(text.split()))
    if not line:
        return ""
    short = re.split(r"(?<=[a-z0-9`)\"])(?:\. (?=[A-Z`])|; (?![^(]*\)))", line)[0]
    return short if short.endswith((".", ":", "?")) else f"{short}."


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for name, text in pages().items():
            (DOCS / name).write_text(text, "utf-8")
    else:
        print(page("reference-api.md"), end="")

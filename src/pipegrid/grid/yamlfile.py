"""
What a YAML file of the user's says: read by libyaml where PyYAML was built with it, an eighth of the time.

**Bounds.** The caller bounds the bytes. Aliases let a few of them stand for more than there is memory for,
as soon as somebody copies or prints what they stand for (merge keys, ``<<``, copy at once); so what a file
with aliases says is counted as it would be without them. And what is nested some 30 000 deep makes libyaml
run out of stack, which ends the process; so where there are brackets or indentation enough for anything like
it, the depth is found out first (which takes as long as reading it all).
"""

from __future__ import annotations

import re
from typing import Any

from pipegrid.core.text import decode_text
from pipegrid.errors import UsageError
from pipegrid.grid.spelling import yaml_problem

MAX_NODES = 1_000_000
"""Of a file with aliases; a server takes a dozen."""

MAX_DEPTH = 100
"""A servers.yaml has five levels."""

_BRACKETS = 5000
_INDENTATION = re.compile(rb"[ \t?:-]{1000}")


def parse_yaml(data: bytes, name: str) -> Any:
    """
    Return what a YAML file of the user's says.

    Args:
        name: of the file, for errors.

    Raises:
        UsageError: it is no text, see ``decode_text``, or no YAML, or its aliases stand for too much.
    """
    import yaml  # takes long to import

    data = decode_text(data, name).encode("utf-8")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if loader is not yaml.SafeLoader and _may_be_deep(data):
            _check_depth(loader(data))
        has_aliases = b"*" in data
        document = yaml.load(data, _bounded(loader) if has_aliases else loader)
        if has_aliases and _nodes(document, {}) > MAX_NODES:
            raise ValueError(_TOO_MUCH)
        if _is_deep(document):
            raise ValueError(_TOO_DEEP)
        return document
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UsageError(
            f"cannot understand {name}: {yaml_problem(error)}; correct it by hand"
        ) from error


def repeated_keys(data: bytes, key: str) -> list[tuple[str, int]]:
    """
    Return what the map under a key at the top has twice, each with the line of the later one, which counts.

    Args:
        data: of a file that ``parse_yaml`` has read.
    """
    import yaml

    repeated = []
    root: Any = yaml.compose(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for name, entries in root.value if isinstance(root, yaml.MappingNode) else ():
        if name.value != key or not isinstance(entries, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for each, _ in entries.value:
            if isinstance(each, yaml.ScalarNode):
                if each.value in seen:
                    repeated.append((each.value, each.start_mark.line + 1))
                seen.add(each.value)
    return repeated


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"
_TOO_MUCH = f"its aliases stand for more than {MAX_NODES} values"


def _may_be_deep(data: bytes) -> bool:
    """Whether collections may be nested too deeply."""
    return data.count(b"[") + data.count(b"{") > _BRACKETS or _INDENTATION.search(data) is not None


def _check_depth(parser: Any) -> None:
    """Read a file's structure alone. Raises ValueError if it is too deep."""
    from yaml.events import CollectionEndEvent, CollectionStartEvent

    depth = 0
    while parser.check_event():
        event = parser.get_event()
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(_TOO_DEEP)
        elif isinstance(event, CollectionEndEvent):
            depth -= 1


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, (dict, list)) for each in level)


def _bounded(loader: Any) -> Any:
    """Return a loader that counts what merge keys copy."""
    from yaml.constructor import ConstructorError

    class Bounded(loader):  # type: ignore[misc]
        merged = 0

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            self.merged += len(node.value)
            if self.merged > MAX_NODES:
                raise ConstructorError(None, None, _TOO_MUCH, node.start_mark)

    return Bounded


def _nodes(value: Any, known: dict[int, int]) -> int:
    """Return how many values there are, each as often as it is referred to; of a circle, too many."""
    children: list[Any] = []
    if isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, set)):
        children = list(value)
    if not children:
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_NODES + 1  # until it is known: who meets it meanwhile is within it
        known[id(value)] = 1 + sum(_nodes(each, known) for each in children)
    return known[id(value)]

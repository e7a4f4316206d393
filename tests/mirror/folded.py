"""A file system that takes names for one that differ in case only, pretended."""

from __future__ import annotations

import builtins
import os
from typing import Any

from twisted.trial.unittest import SynchronousTestCase, TestCase

_DIRECTORIES = ("dir_fd", "src_dir_fd", "dst_dir_fd")


def fold_cases(test: SynchronousTestCase | TestCase, *roots: str) -> None:
    """
    Have names be lower case, whatever they are given as, until the test ends.

    Args:
        roots: absolute; below these, and in open directories. Other paths stay as they are.
    """
    for name in ("open", "stat", "lstat", "mkdir", "rmdir", "unlink", "rename", "link"):
        test.patch(os, name, _folding(getattr(os, name), roots))
    test.patch(builtins, "open", _folding(builtins.open, roots))


def _folding(real: Any, roots: tuple[str, ...]) -> Any:
    def fold(path: Any, everything: bool) -> Any:
        if isinstance(path, str):
            for root in ("",) if everything else roots:
                if path.startswith(root):
                    return root + path[len(root) :].lower()
        return path

    def folding(*args: Any, **options: Any) -> Any:
        inside = any(options.get(each) is not None for each in _DIRECTORIES)
        return real(fold(args[0], inside), *(fold(each, inside) for each in args[1:]), **options)

    return folding

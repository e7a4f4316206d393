"""Where the files of one ``get`` go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipegrid.core.text import printable
from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.tree.local_directory import DirectoryFd


class OutputPaths:
    """
    A path for each file; None: standard output.

    Args:
        paths: in the order of the files.

    Attributes:
        directory: that they go into, if it is one.
        home: the same, once it was made: what comes into its place gets nothing.
    """

    def __init__(
        self, files: Sequence[NamedFile[Any]], paths: Sequence[str | None], directory: str | None
    ) -> None:
        self.directory = directory
        self.home: DirectoryFd | None = None
        self._paths = {id(file): path for file, path in zip(files, paths, strict=True)}

    def of(self, file: NamedFile[Any]) -> str | None:
        """Return where the file goes; None for one with a problem, too."""
        return self._paths.get(id(file))

    def make_directory(self) -> None:
        """
        Make the directory if it is missing.

        Raises:
            SinkError: that cannot be done, or something else is there.
        """
        assert self.directory is not None
        self.home = made_home(self.directory)


def made_home(path: str) -> DirectoryFd:
    """
    Return the directory that files go to, made if it is missing.

    Raises:
        SinkError: that cannot be done, or something else is there.
    """
    from pipegrid.tree.local_directory import DirectoryFd, unmade

    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise unmade(path, error) from error
    return DirectoryFd(path)


def destinations(files: Sequence[NamedFile[Any]], output: str | None) -> OutputPaths:
    """
    Return where each file goes: several into a directory, one also into a file or to standard output.

    Of a name with directories in it only the last part counts, so that nothing is written elsewhere.

    Raises:
        UsageError: there is no place for all of them, or two would have the same name.
    """
    count = len(files)
    files = [file for file in files if file.problem is None]
    if output is None:
        if count > 1:
            raise UsageError(f"{count} files cannot be told apart on standard output; add -o DIR")
        return OutputPaths(files, [None], None)
    if count == 1 and not (output.endswith("/") or os.path.isdir(output)):
        return OutputPaths(files, [output], None)
    names = [_name(file) for file in files]
    taken: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        if name in taken:
            raise UsageError(
                f"two caps would be fetched to {printable(os.path.join(output, name))}, the "
                f"{taken[name]}. and the {number}.; give them different names in the cap file"
            )
        taken[name] = number
    return OutputPaths(files, [os.path.join(output, name) for name in names], output)


def _name(file: NamedFile[Any]) -> str:
    name = file.base_name if file.name is None else file.name.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise UsageError(f"{file.label!r} names no file; correct it in the cap file")
    return name

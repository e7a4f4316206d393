"""
Forms with several files, or with a folder: each file becomes a child of a directory, or of one below it.

A browser sends the files of a folder with their paths as names, also without scripts. Missing directories are
made. What cannot be stored does not keep the rest from being stored, and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.mutable.directory_content_edits import Link
from pipegrid.core.text import composed, counted, printable
from pipegrid.errors import PipegridError
from pipegrid.gateway.form_body import FormFile
from pipegrid.gateway.http_response import HttpResponse, WebError, problem_of
from pipegrid.gateway.web_api.api_request import ApiRequest, when_done
from pipegrid.gateway.web_api.path_lookup import check_writes, children_of
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.tree.directory import Directory, check_name, make_directories
from pipegrid.tree.walk import TreePath

AT_ONCE = 16
"""Directories that are made, and files that are stored, at the same time."""

MAX_DEPTH = 100
MAX_FOLDERS = 1000
"""In one form: each may be a new directory, with a key of its own."""

MAX_NAMED = 20
"""Files that could not be stored and are named in the response."""


def are_several(files: Sequence[FormFile]) -> bool:
    """Return whether a form has several files, or one in a folder."""
    return len(files) > 1 or any("/" in file.name for file in files)


def form_paths(files: Sequence[FormFile]) -> list[TreePath]:
    """
    Return where the files of a form belong.

    Raises:
        WebError: a path is none, leads out of the directory, is given twice, or is also a folder; or there
            are too many folders.
        UsageError: no child can have such a name.
    """
    found: dict[TreePath, None] = {}
    folders: set[TreePath] = set()
    for file in files:
        path = tuple(composed(name) for name in file.name.split("/"))
        if len(path) > MAX_DEPTH or {"", ".", ".."} & set(path):
            shown = printable(file.name[:100])
            raise WebError(
                400, f"'{shown}' is not a path of a file in a folder; nothing was stored"
            )
        if path in found:
            shown = printable("/".join(path)[:100])
            raise WebError(400, f"the form has two files '{shown}'; nothing was stored")
        for name in path:
            check_name(name)
        found[path] = None
        folders.update(_folders_of(path))
        if len(folders) > MAX_FOLDERS:
            raise WebError(413, f"the form has more than {MAX_FOLDERS} folders; send them in parts")
    if both := folders & found.keys():
        shown = printable("/".join(min(both))[:100])
        raise WebError(400, f"'{shown}' is a file and a folder; nothing was stored")
    return list(found)


def _folders_of(path: TreePath) -> list[TreePath]:
    return [path[:depth] for depth in range(1, len(path))]


class FolderUpload:
    """
    The files of one form.

    Attributes:
        problems: why files could not be stored, by their paths.
    """

    def __init__(self, call: ApiRequest, cap: DirectoryCap) -> None:
        self._grid = call.grid
        self._replace = call.arguments.replace()
        self._directories: dict[TreePath, Directory | PipegridError] = {
            (): Directory(call.grid, cap)
        }
        self._taken: dict[TreePath, frozenset[str]] = {}
        self.problems: dict[TreePath, WebError] = {}

    async def store(self, files: Sequence[tuple[TreePath, FormFile]]) -> None:
        """Store and link all that can be."""
        folders = {each for path, _ in files for each in _folders_of(path)}
        for depth in range(1, MAX_DEPTH):
            level = [path for path in folders if len(path) == depth]
            await few_at_a_time(AT_ONCE, [partial(self._make, path) for path in level])
        if self._replace == "false":
            used = {path[:-1] for path, _ in files}
            await few_at_a_time(AT_ONCE, [partial(self._look, path) for path in used])
        await few_at_a_time(AT_ONCE, [partial(self._store, *each) for each in files])

    def _directory(self, path: TreePath) -> Directory:
        """Return a directory; raises why it could not be made, or not be read."""
        found = self._directories[path]
        if isinstance(found, PipegridError):
            raise found
        return found

    async def _make(self, path: TreePath) -> None:
        try:
            above = self._directory(path[:-1]).cap
            self._directories[path] = await make_directories(self._grid, above, path[-1:], "sdmf")
        except PipegridError as error:
            self._directories[path] = error

    async def _look(self, path: TreePath) -> None:
        """See which names are taken, so that what has one is not stored."""
        try:
            cap = self._directory(path).cap
            self._taken[path] = frozenset(await children_of(self._grid, cap))
        except PipegridError as error:
            self._directories[path] = error

    async def _store(self, path: TreePath, file: FormFile) -> None:
        try:
            directory = self._directory(path[:-1])
            if path[-1] in self._taken.get(path[:-1], ()):
                raise WebError(409, "there is a child of this name already")
            with file.opened() as source:
                cap = (await self._grid.put(source)).cap
            # As where one file is uploaded: it replaces a file, and never a directory.
            link = Link(path[-1], cap, None, None, self._replace != "false", False)
            await directory.change([link])
        except PipegridError as error:
            self.problems[path] = problem_of(error)


async def upload_files(
    call: ApiRequest, cap: DirectoryCap, files: Sequence[FormFile]
) -> HttpResponse:
    """
    Answer ``t=upload`` of a form with several files.

    Raises:
        WebError: some were not stored; it names them.
    """
    if call.arguments.format() in ("SDMF", "MDMF"):
        raise WebError(
            400, "several files are stored as immutable ones; leave out format and mutable"
        )
    paths = form_paths(files)
    work = FolderUpload(call, check_writes(cap))
    await work.store(list(zip(paths, files, strict=True)))
    if work.problems:
        raise _not_stored(work.problems, len(files))
    return when_done(call, f"{counted(len(files), 'file was', 'files were')} stored\n")


def _not_stored(problems: dict[TreePath, WebError], count: int) -> WebError:
    statuses = {problem.status for problem in problems.values()}
    named = [
        f"{printable('/'.join(path))} ({problem})"
        for path, problem in sorted(problems.items())[:MAX_NAMED]
    ]
    more = len(problems) - len(named)
    rest = f", and {more} more" if more else ""
    text = f"{len(problems)} of {count} files were not stored: {', '.join(named)}{rest}"
    return WebError(statuses.pop() if len(statuses) == 1 else 500, text)

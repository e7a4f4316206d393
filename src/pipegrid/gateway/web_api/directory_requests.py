"""Requests for directories: listings, new directories, and forms that change links."""

from __future__ import annotations

from collections.abc import Mapping

from pipegrid.core.caps import DirectoryCap, UnknownCap
from pipegrid.core.mutable.directory_content_edits import Link, Unlink
from pipegrid.core.text import composed
from pipegrid.errors import ChildExists, NotEnoughSharesError, PipegridError
from pipegrid.gateway.http_response import (
    JSON_OF_OBJECTS,
    HttpResponse,
    WebError,
    json_text,
    no_such_child,
    problem_of,
)
from pipegrid.gateway.web_api.api_request import ApiRequest, Handler, when_done
from pipegrid.gateway.web_api.children_json import link_of, links_of, parse_children
from pipegrid.gateway.web_api.file_requests import (
    cap_text,
    link_file,
    parent_for,
    replace_file,
    tagged,
)
from pipegrid.gateway.web_api.form_upload import are_several, upload_files
from pipegrid.gateway.web_api.new_objects import MKDIRS, new_directory, uploaded
from pipegrid.gateway.web_api.object_json import directory_json
from pipegrid.gateway.web_api.path_lookup import (
    FoundObject,
    best_cap,
    check_writes,
    children_of,
    find,
    unreadable,
)
from pipegrid.gateway.web_ui.backup_page import backup_page
from pipegrid.gateway.web_ui.check_page import check_form
from pipegrid.gateway.web_ui.directory_archive import send_archive
from pipegrid.gateway.web_ui.directory_page import directory_page, entry_page
from pipegrid.gateway.web_ui.object_page import object_page
from pipegrid.gateway.web_ui.read_cap_page import share_page
from pipegrid.tree.directory import Directory, move

UNNAMED = "unknown-filename"
"""Name that Tahoe-LAFS gives to an uploaded file if the form contains no name."""


DIRECTORY_PAGES: Mapping[str, Handler] = {
    "": directory_page,
    "backups": backup_page,
    "check-form": check_form,
    "open": directory_page,
    "info": object_page,
    "rename-form": entry_page,
    "share": share_page,
    "archive": send_archive,
}
"""Handlers that return pages about a directory, by the argument ``t``."""


async def get_directory(call: ApiRequest, found: FoundObject) -> HttpResponse | None:
    """Answer a GET request for a directory."""
    cap, operation = found.directory, call.arguments.operation
    if operation == "json":
        return tagged(call, cap, await _listing(call, cap))
    if operation in DIRECTORY_PAGES:
        return await DIRECTORY_PAGES[operation](call, found)
    if operation not in ("uri", "readonly-uri"):
        raise WebError(400, "GET of a directory does not support this t")
    return tagged(call, cap, cap_text(cap, operation))


async def _listing(call: ApiRequest, cap: DirectoryCap) -> HttpResponse:
    try:
        children = await children_of(call.grid, cap)
    except PipegridError as error:
        problem = problem_of(error)
        status = 410 if problem.status == 500 else problem.status
        text = json_text({"error": str(problem)})
        return HttpResponse(text, status, content_type=JSON_OF_OBJECTS)
    body = json_text(["dirnode", directory_json(cap, children)])
    return HttpResponse(body, content_type=JSON_OF_OBJECTS)


async def delete_link(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer a DELETE request: remove the link; the shares of the child stay on the servers."""
    if found.parent is None:
        raise WebError(400, "DELETE removes a link; give the path of one below a directory")
    await Directory(call.grid, check_writes(found.parent)).change([Unlink(found.name)])
    return HttpResponse("" if found.cap is None else str(found.cap))


def makes_directory(call: ApiRequest) -> bool:
    """Return whether a request creates the directory at the end of its path."""
    names = call.names[2:]
    return (
        call.method in ("PUT", "POST")
        and call.arguments.operation in MKDIRS
        and bool(names and names[-1])
        and not _name_of_new(call)
    )


def _name_of_new(call: ApiRequest) -> str:
    return call.arguments.text("name").strip() if call.method == "POST" else ""


async def make_directory(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Answer ``t=mkdir`` and similar: create the directory at the path, or the child ``name`` of an existing
    directory.
    """
    operation = call.arguments.operation
    name = _name_of_new(call)
    if found.exists and not name:
        return _existing(found, operation)
    replace = False
    if found.exists:
        replace = operation == "mkdir" and call.arguments.flag("replace", True)
        found = _place_of(found, name) if replace else await _child_of(call, found, name, False)
    check_writes(found.parent)
    if call.arguments.format() == "CHK" and operation == "mkdir":
        raise WebError(400, "a directory that can change is SDMF or MDMF, not CHK")
    cap = await new_directory(call)
    directory, name = await parent_for(call, found)
    try:
        await directory.change([Link(name, cap, None, None, replace)])
    except NotEnoughSharesError as error:
        raise unreadable(directory.cap, error) from error
    except ChildExists:  # another client has linked it meanwhile
        there = (await children_of(call.grid, directory.cap)).get(composed(name))
        if replace or there is None or _name_of_new(call):
            raise
        call.grid.check_access(best_cap(there))
        return _existing(FoundObject(best_cap(there), there, directory.cap), operation)
    return when_done(call, str(cap))


def _existing(found: FoundObject, operation: str) -> HttpResponse:
    if not isinstance(found.cap, DirectoryCap):
        raise WebError(400, "a file of this name exists, not a directory")
    if operation != "mkdir":
        raise WebError(409, "the directory exists; give another path, or the argument name")
    return HttpResponse(str(found.cap))


async def _child_of(
    call: ApiRequest, found: FoundObject, given: str, replace: bool = True
) -> FoundObject:
    """
    Return the child that has this name in a directory, or the place of the name if there is no such child;
    raise WebError if there is one and ``replace`` is false.
    """
    place = _place_of(found, given)
    assert place.parent is not None
    child = (await children_of(call.grid, place.parent)).get(place.name)
    if child is None:
        return place
    if not replace:
        raise WebError(409, "there is a child of this name already; choose another")
    return FoundObject(best_cap(child), child, place.parent, (), place.name)


def _place_of(found: FoundObject, given: str) -> FoundObject:
    """Return the place of a name in a directory, without looking up the name."""
    if "/" in given:
        raise WebError(400, "the name of a child has no slash; make the directories one by one")
    if not found.is_directory:
        raise WebError(400, "this is not a directory, so it has no children")
    name = composed(given)
    return FoundObject(None, None, found.directory, (name,), name)


async def upload(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """
    Answer ``t=upload``: store the form's file as a child, or as content of an existing file, or store several
    files.
    """
    files = call.arguments.files
    given = call.arguments.text("name").strip()
    if isinstance(found.cap, DirectoryCap) and not given and are_several(files):
        return await upload_files(call, found.cap, files)
    body = uploaded(call)
    if found.exists and isinstance(found.cap, DirectoryCap):
        name = given or files[0].name.strip()
        if not name and not files[0].size:  # browsers send this if no file was chosen
            raise WebError(400, "the form has no file; choose one, or give it a name")
        name = name or UNNAMED
        found = await _child_of(call, found, name)
        if isinstance(found.cap, DirectoryCap):
            raise WebError(409, "there is a directory of this name; choose another")
    if not found.exists:
        cap = await link_file(call, found, body)
    else:
        if isinstance(found.cap, UnknownCap) and found.parent is None:
            raise WebError(400, "this is not a capability that can be uploaded to")
        cap = await replace_file(call, found, body)
    return when_done(call, str(cap))


async def link_cap(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer ``POST ?t=uri``: link a cap under a name."""
    name, text = call.arguments.text("name").strip(), call.arguments.text("uri").strip()
    if not name or not text:
        raise WebError(400, "t=uri takes the arguments name and uri; one of them is missing")
    if "/" in name:
        raise WebError(400, "the name of a child has no slash")
    directory = Directory(call.grid, check_writes(found.cap))
    await directory.change([link_of(name, {"rw_uri": text}, call.arguments.replace())])
    return when_done(call, text)


async def unlink(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer ``t=unlink``: remove a child from a directory."""
    directory = Directory(call.grid, check_writes(found.cap))
    await directory.change([Unlink(call.arguments.text("name"))])
    return when_done(call, "the link was removed\n")


async def relink(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer ``t=rename`` and ``t=relink``: rename a child, or move it to another directory."""
    arguments = call.arguments
    is_rename = arguments.operation == "rename"
    old, new = arguments.text("from_name"), arguments.text("to_name").strip()
    to_dir = arguments.get("to_dir")
    if not old.strip() or (is_rename and not new):
        raise WebError(400, "from_name or to_name is missing: which child, and what it becomes")
    if is_rename and to_dir is not None:
        raise WebError(400, "t=rename stays in its directory; t=relink takes to_dir")
    if "/" in new:
        raise WebError(400, "the name of a child has no slash; another directory is to_dir")
    source = check_writes(found.cap)
    old = await _name_of_child(call, source, old)
    new = new or old
    target = source if to_dir is None else await _target(call, to_dir)
    replace = arguments.replace()
    if target == source and composed(old) == composed(new):
        if composed(old) not in await children_of(call.grid, source):
            raise no_such_child(old)
        return when_done(call, "the child has this name already\n")
    await move(
        Directory(call.grid, source),
        old,
        Directory(call.grid, target),
        new,
        replace != "false",
        replace == "true",
    )
    return when_done(call, "the child was moved\n")


async def _name_of_child(call: ApiRequest, cap: DirectoryCap, given: str) -> str:
    """Return a name as given if a child has exactly this name; otherwise without surrounding white space."""
    bare = given.strip()
    if bare == given or composed(given) in await children_of(call.grid, cap):
        return given
    return bare


async def _target(call: ApiRequest, to_dir: str) -> DirectoryCap:
    text, _, path = to_dir.partition("/")
    found = await find(call.grid, text, path.split("/") if path else [])
    if not found.exists:
        raise no_such_child(found.missing[0])
    if not isinstance(found.cap, DirectoryCap):
        raise WebError(400, "to_dir is not a directory, so nothing can be moved there")
    return check_writes(found.cap)


async def set_children(call: ApiRequest, found: FoundObject) -> HttpResponse:
    """Answer ``t=set_children``: link many children; if one cannot be linked, none is."""
    data = call.body.read_all(call.settings.limits.children_bytes, "the list of children")
    replace = call.arguments.replace()
    if "replace" not in call.arguments.values and not call.arguments.flag("overwrite", True):
        replace = "false"
    links = links_of(parse_children(data), replace)
    directory = Directory(call.grid, check_writes(found.cap))
    if links:
        await directory.change(links)
    return when_done(call, "the children were linked\n")

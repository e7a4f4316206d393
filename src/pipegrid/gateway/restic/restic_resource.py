"""
The resource ``/restic``: requests of restic's REST protocol, versions 1 and 2, and their responses.

``/restic/NAME/`` and ``/restic/USER/NAME/`` are repositories. Statuses are those of rest-server, so that
restic knows which failures are final. However, storing an object again with the same content succeeds, since
restic repeats a request whose response was lost.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.web.http_headers import Headers
from twisted.web.resource import Resource

from pipegrid.errors import UsageError
from pipegrid.gateway.body_spool import IN_MEMORY_BYTES, BodyRefused, BodySpool
from pipegrid.gateway.gateway_settings import GatewaySettings, ResticSettings
from pipegrid.gateway.http_response import HttpResponse, ResponseStream, WebError, respond
from pipegrid.gateway.restic.password_file import PasswordFile, TooManyPasswords
from pipegrid.gateway.restic.repositories import ObjectExists, Repositories, Repository
from pipegrid.gateway.restic.repository_paths import (
    CONFIG,
    LOCKS,
    RepositoryPath,
    list_items,
    list_type,
    parse_object_range,
    parse_path,
)
from pipegrid.gateway.web_api.download_turns import PacedDownload
from pipegrid.tree.tree_grid import Grid

MAX_OBJECT_BYTES = 1 << 30
"""Maximum size of an object: restic's packs have 16 MiB, or up to 128 if configured, its index about 30."""

_OBJECT_TYPE = "application/octet-stream"
_LOOPBACK = ("127.", "::1", "::ffff:127.")

log = Logger()


class ResticResource(Resource):
    """
    Handles all requests below ``/restic``: checks passwords, and stores, sends, lists and removes objects.

    Raises:
        UsageError: the password file cannot be read; or it does not exist although repositories are private;
            or it exists although no passwords are required.
    """

    isLeaf = True

    def __init__(self, grid: Grid, settings: GatewaySettings) -> None:
        super().__init__()
        self._grid = grid
        self._settings: ResticSettings = settings.restic
        self._repositories = Repositories(grid, settings.directory)
        self._passwords: PasswordFile | None = None
        self._said = False
        path, private = self._settings.password_file, self._settings.private_repositories
        if private and (self._settings.no_auth or path is None):
            raise UsageError(
                "repositories can belong to users only where there are passwords; give a password file"
            )
        if path is None or not (private or path.exists()):
            return
        if self._settings.no_auth:
            raise UsageError(
                f"--no-auth contradicts the password file {path}; leave the option out, or remove the file"
            )
        self._passwords = PasswordFile(path, grid.workers, grid.clock, _say)

    def look_at_head(
        self, method: bytes, path: bytes, headers: Headers, length: int | None, body: BodySpool
    ) -> None:
        """
        Refuse a body before it arrives if it is too large or, unless it fits into memory, has no valid user.
        """
        body.allow(MAX_OBJECT_BYTES)
        body.hasher = hashlib.sha256()
        if self._settings.no_auth or (length is not None and length <= IN_MEMORY_BYTES):
            return
        try:
            passwords = self._password_file()
        except WebError as error:
            body.refuse(BodyRefused(str(error), error.status))
            return
        given = (headers.getRawHeaders("authorization") or [""])[0]

        async def check() -> None:
            if not passwords.names_user(given) or await passwords.user_of(given) is None:
                body.refuse(BodyRefused(_WRONG_PASSWORD, 401))

        # Other errors are raised again when the request is handled.
        Deferred.fromCoroutine(check()).addErrback(lambda _: None)

    def render(self, request: Any) -> int:
        """Begin to answer a request; if the client disconnects, the work is cancelled."""
        return respond(request, self._answer(request), self._grid.clock)

    async def _answer(self, request: Any) -> HttpResponse | None:
        request.setHeader(b"accept-ranges", b"bytes")
        user = await self._admitted(request)
        path = parse_path(_path_below(request))
        if path is None:
            raise WebError(
                404,
                "this is not a path of restic's REST protocol; a repository is /restic/NAME/, and an object "
                "is named by 64 hexadecimal digits",
            )
        if self._settings.private_repositories and path.folders[0] != user:
            raise _unauthorized("this repository belongs to another user")
        method = request.method.decode("ascii", "replace")
        allowed = _allowed(path)
        if method not in allowed:
            raise WebError(
                405, f"{method[:20]} is not possible here", {"Allow": ", ".join(allowed)}
            )
        if not path.kind:
            return await self._change_repository(request, path, method)
        if method == "POST":
            return await self._store(request, path)
        if method == "DELETE":
            return await self._remove(path)
        if path.is_object:
            await self._send(request, path)
        else:
            await self._list(request, path)
        return None

    # Access.

    async def _admitted(self, request: Any) -> str | None:
        """
        Return the user of a request, None if no passwords are required; raise WebError if the client has no
        access.
        """
        if self._settings.no_auth:
            if _is_on_this_machine(request):
                return None
            raise WebError(
                403,
                "clients on other machines need a password, and this gateway was started with --no-auth; "
                f"start it without, and make {self._settings.password_file} with 'htpasswd -B -c FILE USER'",
            )
        try:
            user = await self._password_file().user_of(request.getHeader("authorization"))
        except TooManyPasswords:
            raise WebError(
                503, "too many passwords are being checked; try again", {"Retry-After": "5"}
            ) from None
        if user is None:
            raise _unauthorized(_WRONG_PASSWORD)
        return user

    def _password_file(self) -> PasswordFile:
        """
        Return the password file; it may have been created after the gateway started.

        Raises:
            WebError: the file does not exist, or cannot be read.
        """
        path = self._settings.password_file
        try:
            if self._passwords is None and path is not None and path.exists():
                self._passwords = PasswordFile(path, self._grid.workers, self._grid.clock, _say)
            if self._passwords is not None:
                return self._passwords
            why = (
                f"restic's clients need a password, and there is no file of passwords; make {path} with "
                "'htpasswd -B -c FILE USER', or start the gateway with --no-auth, which gives all users of "
                "this machine access"
            )
        except UsageError as error:
            why = str(error)
        if not self._said:  # restic shows only the status, not the text
            self._said = True
            _say(why)
        raise WebError(403, why)

    # Repositories.

    async def _change_repository(
        self, request: Any, path: RepositoryPath, method: str
    ) -> HttpResponse:
        if method == "DELETE":
            raise WebError(
                501,
                "the gateway does not remove repositories; run 'pipegrid rm restic:NAME' on its machine",
            )
        if request.args.get(b"create") != [b"true"]:
            raise WebError(400, "POST creates a repository only with ?create=true")
        await self._repositories.make(path.folders)
        return HttpResponse()

    async def _opened(self, path: RepositoryPath, *, fresh: bool = False) -> Repository:
        repository = await self._repositories.open(path.folders, fresh=fresh)
        if repository is None:
            raise WebError(
                404,
                "there is no repository of this name; create it with 'restic init'",
                _NOT_STORED,
            )
        return repository

    async def _list(self, request: Any, path: RepositoryPath) -> None:
        repository = await self._opened(path)
        kind = list_type(request.getHeader("accept") or "")
        stream = ResponseStream(request)
        request.setHeader(b"content-type", kind.encode("ascii"))
        before = b"["
        async for objects in repository.objects(path.kind):
            items = list_items(objects, kind)
            if items:
                await stream.ready()
                stream.write(before + b",".join(items))
                before = b","
        stream.write(b"]" if before == b"," else b"[]")
        stream.finish()

    # Objects.

    async def _send(self, request: Any, path: RepositoryPath) -> None:
        # Each command of restic sends this request first: HEAD of ``config``.
        is_first = path.kind == CONFIG and request.method == b"HEAD"
        repository = await self._opened(path, fresh=is_first)
        found = await repository.find(path.kind, path.object_id)
        if found is None:
            raise WebError(404, f"there is no such object in '{path.kind}'", _NOT_STORED)
        part = parse_object_range(request.getHeader("range"), found.size)
        if part is None:
            raise WebError(
                416,
                f"the range begins beyond the end of the object, which has {found.size} bytes",
                {"Content-Range": f"bytes */{found.size}"},
            )
        request.setHeader(b"content-type", _OBJECT_TYPE.encode("ascii"))
        request.setHeader(b"content-length", str(part.length).encode("ascii"))
        if part.content_range:
            request.setResponseCode(206)
            request.setHeader(b"content-range", part.content_range.encode("ascii"))
        if request.method != b"HEAD":
            data = await repository.content(path.kind, found)
            if data is not None:
                request.write(data[part.start : part.start + part.length])
            else:
                wanted, turns = (part.start, part.length), request.site.downloads
                await PacedDownload(self._grid, found, request, lambda _: wanted, turns).run()
        request.finish()

    async def _store(self, request: Any, path: RepositoryPath) -> HttpResponse:
        body: BodySpool = request.body
        body.check()
        assert body.hasher is not None
        digest = body.hasher.hexdigest()
        if path.kind != CONFIG and not hmac.compare_digest(digest, path.object_id):
            raise WebError(400, "the SHA-256 of the body differs from the object's name")
        repository = await self._opened(path)
        try:
            with body.opened() as source:
                await repository.store(path.kind, path.object_id, source)
        except ObjectExists:
            raise WebError(403, "a different config exists already and is not replaced") from None
        return HttpResponse()

    async def _remove(self, path: RepositoryPath) -> HttpResponse:
        if self._settings.append_only and path.kind != LOCKS:
            raise WebError(403, "this gateway removes only locks, since it is append-only")
        repository = await self._opened(path)
        await repository.remove(path.kind, path.object_id)
        return HttpResponse()


_WRONG_PASSWORD = "the user or the password is wrong, or missing"
_NOT_STORED = {"Cache-Control": "no-store"}


def _unauthorized(why: str) -> WebError:
    return WebError(401, why, {"WWW-Authenticate": 'Basic realm="restic", charset="UTF-8"'})


def _allowed(path: RepositoryPath) -> tuple[str, ...]:
    if not path.kind:
        return ("POST", "DELETE")
    return ("HEAD", "GET", "POST", "DELETE") if path.is_object else ("GET",)


def _path_below(request: Any) -> bytes:
    """Return the path after ``/restic/``, percent-encoded as in the request."""
    path: bytes = request.path
    return path.split(b"/", 2)[-1] if path.count(b"/") > 1 else b""


def _is_on_this_machine(request: Any) -> bool:
    address = request.getClientAddress()
    return isinstance(address, UNIXAddress) or str(getattr(address, "host", "")).startswith(
        _LOOPBACK
    )


def _say(sentence: str) -> None:
    log.warn("{sentence}", sentence=sentence)

"""The root of the gateway's site, with the resource for each first part of a path; and ``Monitoring``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from twisted.web.resource import IResource, Resource
from twisted.web.static import File

from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.http_response import HttpResponse, WebError
from pipegrid.gateway.server_states import ServerStates
from pipegrid.gateway.transfer_records import RecordedGrid
from pipegrid.gateway.web_api.api_request import ApiRequest, ApiResource
from pipegrid.gateway.web_api.gateway_metrics import GatewayCollector
from pipegrid.gateway.web_api.log_socket import PrivateResource
from pipegrid.gateway.web_api.object_resource import answer_named, object_resource
from pipegrid.gateway.web_api.operation_handles import OperationHandles
from pipegrid.gateway.web_api.operation_requests import answer_operation, operation_posts
from pipegrid.gateway.web_api.status_requests import STATUS_ANSWERS, GatewayState
from pipegrid.gateway.web_ui.assets import AssetsResource
from pipegrid.gateway.web_ui.transfers_page import answer_uploads
from pipegrid.tree.tree_grid import Grid


def root_resource(
    grid: Grid,
    settings: GatewaySettings,
    handles: OperationHandles,
    further: Mapping[bytes, IResource],
) -> IResource:
    """
    Return the resource of ``/`` with everything below it.

    Args:
        further: additional resources, by the first part of the path, such as ``b"status"``; the key for ``/``
            itself is empty.
    """
    root = _Root(grid, settings)
    objects = object_resource(grid, settings, operation_posts(handles))
    root.putChild(b"uri", objects)
    root.putChild(b"cap", objects)
    named = ApiResource(grid, settings, answer_named)
    root.putChild(b"named", named)
    root.putChild(b"file", named)
    root.putChild(b"uploads", ApiResource(grid, settings, answer_uploads))
    if settings.static.is_dir():
        root.putChild(b"static", File(str(settings.static)))
    root.putChild(b"interface", AssetsResource())
    for name, resource in further.items():
        root.putChild(name, resource)
    return root


class _Root(Resource):
    """The resource of ``/``; unknown paths get 404."""

    def __init__(self, grid: Grid, settings: GatewaySettings) -> None:
        super().__init__()
        self._nothing = ApiResource(grid, settings, _nothing)

    def getChild(self, path: bytes, request: object) -> IResource:
        """Return the resource for an unknown first part of a path."""
        return self._nothing


async def _nothing(_: ApiRequest) -> HttpResponse | None:
    raise WebError(404, "the gateway has nothing at this path")


class Monitoring:
    """
    The objects that monitor one gateway, and the operations that the gateway runs for clients.

    Args:
        token: returns the secret that ``/private`` requires.

    Attributes:
        servers: the states of the servers.
        handles: operations, by handle.
        private: the resource of ``/private``.
    """

    def __init__(
        self, grid: RecordedGrid, settings: GatewaySettings, token: Callable[[], str]
    ) -> None:
        self._grid = grid
        self._settings = settings
        self._started_s = grid.clock.seconds()
        self.servers = ServerStates(grid, grid.clock, time.time)
        self.handles = OperationHandles(grid, grid.clock)
        self.private = PrivateResource(token)

    def resources(
        self, responses: Callable[[], Mapping[int, int]], connections: Callable[[], int]
    ) -> dict[bytes, IResource]:
        """
        Return the resources that show the gateway's state, by the first part of the path.

        Args:
            responses: returns the number of responses by status.
            connections: returns the number of open connections.
        """
        grid = self._grid
        collector = GatewayCollector(
            grid.records, self.handles, self.servers.latest, responses, connections
        )
        state = GatewayState(grid.records, self.servers, collector, self._started_s)
        answers = {name: partial(answer, state) for name, answer in STATUS_ANSWERS.items()}
        operations = partial(answer_operation, self.handles)
        return {
            b"private": self.private,
            b"operations": ApiResource(grid, self._settings, operations),
            **{name: ApiResource(grid, self._settings, each) for name, each in answers.items()},
        }

    def close(self) -> None:
        """Cancel running operations and server queries, and close the connections of log readers."""
        self.handles.close()
        self.servers.close()
        self.private.close()

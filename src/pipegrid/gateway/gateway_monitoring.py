"""Combines the status pages of a gateway with its operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from pipegrid.gateway.gateway_settings import GatewaySettings
from pipegrid.gateway.recorded_grid import RecordedGrid
from pipegrid.gateway.root_resource import SiteParts
from pipegrid.gateway.server_states import ServerStates
from pipegrid.gateway.web_api.api_request import ApiResource
from pipegrid.gateway.web_api.gateway_metrics import GatewayCollector
from pipegrid.gateway.web_api.log_socket import PrivateResource
from pipegrid.gateway.web_api.operation_handles import OperationHandles
from pipegrid.gateway.web_api.operation_requests import answer_operation, operation_posts
from pipegrid.gateway.web_api.status_requests import (
    STATUS_ANSWERS,
    GatewayState,
    answer_home,
)


class Monitoring:
    """
    The parts of one gateway that monitor it, and its operations.

    Args:
        token: returns the secret of ``/private``.

    Attributes:
        servers: their states.
        handles: operations by handle.
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

    def parts(
        self, responses: Callable[[], Mapping[int, int]], connections: Callable[[], int]
    ) -> SiteParts:
        """
        Return the parts of the site.

        Args:
            responses: returns the number of responses by status.
            connections: returns how many connections are open.
        """
        grid = self._grid
        collector = GatewayCollector(
            grid.records, self.handles, self.servers.latest, responses, connections
        )
        state = GatewayState(grid.records, self.servers, collector, grid.clock, self._started_s)
        resources = {
            name: ApiResource(grid, self._settings, partial(answer, state))
            for name, answer in STATUS_ANSWERS.items()
        }
        resources[b"operations"] = ApiResource(
            grid, self._settings, partial(answer_operation, self.handles)
        )
        return SiteParts(
            {**resources, b"private": self.private},
            operation_posts(self.handles),
            ApiResource(grid, self._settings, partial(answer_home, state)),
        )

    def close(self) -> None:
        """Cancel running operations, and close the connections that read the log."""
        self.handles.close()
        self.servers.close()
        self.private.close()

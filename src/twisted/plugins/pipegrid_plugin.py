"""Lets ``twist`` find the storage server and the gateway; what they do is in ``pipegrid.cli``."""

from twisted.application.service import ServiceMaker
from twisted.python.reflect import namedAny


class GatewayMaker(ServiceMaker):
    """Makes gateways; their options have a name of their own."""

    @property
    def options(self) -> object:
        """The class of the options, which is imported when it is asked for."""
        return namedAny(self.module).GatewayOptions


pipegrid = ServiceMaker(
    "PipeGrid storage server",
    "pipegrid.cli.twist_storage_server",
    "Store shares for PipeGrid and Tahoe-LAFS clients.",
    "pipegrid",
)

pipegrid_gateway = GatewayMaker(
    "PipeGrid gateway",
    "pipegrid.cli.twist_gateway",
    "Let other programs use a grid: Tahoe-LAFS's web API, restic, SFTP.",
    "pipegrid-gateway",
)

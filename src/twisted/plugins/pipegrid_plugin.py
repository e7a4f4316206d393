"""Lets ``twist`` find the storage server and the gateway; what they do is in ``pipegrid.cli``."""

from twisted.application.service import ServiceMaker

pipegrid = ServiceMaker(
    "PipeGrid storage server",
    "pipegrid.cli.twist_plugin",
    "Store shares for PipeGrid and Tahoe-LAFS clients.",
    "pipegrid",
)

pipegrid_gateway = ServiceMaker(
    "PipeGrid gateway",
    "pipegrid.cli.twist_gateway",
    "Let other programs use a grid: Tahoe-LAFS's web API, restic, SFTP.",
    "pipegrid-gateway",
)

"""Lets ``twist pipegrid`` find the storage server. What it does is in ``pipegrid.cli.twist_plugin``."""

from twisted.application.service import ServiceMaker

pipegrid = ServiceMaker(
    "PipeGrid storage server",
    "pipegrid.cli.twist_plugin",
    "Store shares for PipeGrid and Tahoe-LAFS clients.",
    "pipegrid",
)

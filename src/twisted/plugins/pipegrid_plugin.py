"""Lets ``twist pipegrid`` find the storage server. What it does is in ``pipegrid.storage.plugin``."""

from twisted.application.service import ServiceMaker

pipegrid = ServiceMaker(
    "PipeGrid storage server",
    "pipegrid.storage.plugin",
    "Store shares for PipeGrid and Tahoe-LAFS clients.",
    "pipegrid",
)

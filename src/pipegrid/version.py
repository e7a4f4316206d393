"""The version of PipeGrid, as servers, clients and ``--version`` say it."""

__version__ = "0.1.0"

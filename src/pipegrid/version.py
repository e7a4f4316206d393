"""The version of PipeGrid that servers, clients and ``--version`` report."""

__version__ = "0.1.0"

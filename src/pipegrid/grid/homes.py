"""Where a client's directory is, and what its files are called."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_NAME = "pipegrid.cfg"
TAHOE_CONFIG_NAME = "tahoe.cfg"
SERVERS_NAME = "private/servers.yaml"


def default_directory() -> Path:
    """Return the user's own directory: $PIPEGRID_DIR, or ``pipegrid`` among the user's data."""
    explicit = os.environ.get("PIPEGRID_DIR")
    if explicit:
        return Path(explicit)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "pipegrid"


def is_configured(directory: Path) -> bool:
    """Return whether the directory holds a client's configuration."""
    return (directory / CONFIG_NAME).is_file() or (directory / TAHOE_CONFIG_NAME).is_file()

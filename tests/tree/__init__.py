"""Trees of directories."""

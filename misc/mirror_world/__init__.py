"""Repositories by the programs that make them, mirrored, and read by apt and dnf."""

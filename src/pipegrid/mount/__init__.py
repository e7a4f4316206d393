"""Backups and directories of a grid as a read-only file system of this machine."""

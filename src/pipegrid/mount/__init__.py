"""Mounts backups and directories of a grid as a read-only file system on this machine."""

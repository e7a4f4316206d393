"""Backups: runs that store the same directories repeatedly, and read and send only what has changed."""

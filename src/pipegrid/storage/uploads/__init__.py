"""Immutable shares that are being uploaded to a server."""

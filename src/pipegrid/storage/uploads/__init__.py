"""Immutable shares that are being written."""

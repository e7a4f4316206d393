"""Mutable slots and their share files."""

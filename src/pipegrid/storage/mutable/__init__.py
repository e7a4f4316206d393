"""Slots of mutable shares, and their files."""

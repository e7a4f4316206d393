"""Mutable files: who has which version, reading it, and writing the next one."""

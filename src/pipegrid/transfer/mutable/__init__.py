"""Mutable files: finding which server has which version, reading a version, and writing the next one."""

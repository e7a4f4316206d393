"""Mutable files and the directories in them, as pure code."""

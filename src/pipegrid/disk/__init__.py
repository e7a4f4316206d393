"""Durable files: policies, group commits, and files that appear as a whole."""

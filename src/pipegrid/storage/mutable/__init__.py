"""Slots, which are the mutable shares of one file on one server, and their share files."""

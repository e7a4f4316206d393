"""Durable files: durability policies, group commits, and files that appear only when they are complete."""

"""Shares and leases on a disk."""

"""Shares and leases on a server's disk."""

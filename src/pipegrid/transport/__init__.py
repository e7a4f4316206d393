"""Clients of storage servers: one contract, several protocols."""

"""Emulated links for real connections: latency, bandwidth, loss."""

"""
Clients of storage servers: one contract (``transport.interface``), and its implementations for several
protocols.
"""

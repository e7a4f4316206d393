"""A storage server: its protocols on one port, its identity, and its process."""

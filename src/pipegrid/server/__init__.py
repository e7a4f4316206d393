"""Being a storage server: its protocols on one port, its identity, and the process."""

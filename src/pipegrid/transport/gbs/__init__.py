"""The client of a storage server over HTTPS (GBS)."""

"""The client of a storage server over Foolscap."""

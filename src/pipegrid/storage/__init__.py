"""The storage server: shares and leases on disk, and the protocols in front of them."""

"""A storage server over HTTPS (GBS), as the client sees it."""

"""The storage protocol over HTTPS (GBS), at the server."""

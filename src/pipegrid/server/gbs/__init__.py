"""The storage protocol over HTTPS (GBS), on the server's side."""

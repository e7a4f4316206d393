"""The storage protocol over Foolscap, at the server."""

"""The storage protocol over Foolscap, on the server's side."""

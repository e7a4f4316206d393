"""A storage server over Foolscap, as the client sees it."""

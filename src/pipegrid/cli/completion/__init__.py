"""Shell completion: what a shell asks, what could come next, and how it is put into the line."""

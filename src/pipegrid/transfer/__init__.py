"""Moving files: upload, download, check, over any transport."""

"""Transfers of files: upload, download, check and repair, over any transport."""

"""Mutable files, SDMF and MDMF: keys, versions, shares, and the content of directories, all without I/O."""

"""Mutable files, SDMF and MDMF: keys, versions, shares, and the directories in them. All of it is pure."""

"""
Mutable files, SDMF and MDMF: keys, versions, shares, and the directories in them; all of it without I/O.
"""

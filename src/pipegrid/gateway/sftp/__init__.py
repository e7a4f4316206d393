"""SFTP: a directory of the grid for each account, over SSH by Twisted Conch."""

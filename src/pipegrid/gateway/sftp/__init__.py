"""SFTP for clients, over SSH by Twisted Conch; each account has a directory of the grid."""

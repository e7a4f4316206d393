"""restic's REST protocol: each repository is a directory on the grid."""

"""restic's REST protocol: repositories that are directories on a grid."""

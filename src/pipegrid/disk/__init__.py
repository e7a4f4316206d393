"""What must be on a disk to stay there: durability policies, groups, files written whole."""

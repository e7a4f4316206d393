"""A network in virtual time: exact round trips, seeded faults, no sockets and no waiting."""

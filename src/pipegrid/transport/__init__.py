"""Speaking to storage servers: one contract, several wires."""

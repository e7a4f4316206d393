"""Package archives from several mirrors over pipelined HTTP: incremental, verified, crash-safe."""

"""Real engines over HTTP: pooled connections, timers, back-pressure, event streams."""

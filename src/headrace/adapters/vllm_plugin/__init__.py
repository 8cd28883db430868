"""Our scheduler inside vLLM: what runs in the environment of the engine."""

"""Which replica? One cost in seconds."""

"""What an engine publishes of its KV cache: heard, kept in order, and looked up."""

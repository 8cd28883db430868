"""Tokenizers: an engine's own, or a file of ours."""

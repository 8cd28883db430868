"""Whose turn is it? Virtual token counters."""

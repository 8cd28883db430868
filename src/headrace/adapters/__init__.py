"""Implementations of the ports, one folder a kind; they do not know each other."""

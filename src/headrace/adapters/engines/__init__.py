"""Engines behind `ports.engine`."""

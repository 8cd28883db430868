"""The live driver: HTTP in, streams out, the plane in between."""

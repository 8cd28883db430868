"""The emulated inference engine: what vLLM's scheduler would do with the same requests and knobs.

Pure, in integer picoseconds, and exact: many equal steps are taken at once (design 6) with the same
results as one by one. `core` is the engine; it knows no gateway, and the plane knows of it only
what a `Snapshot` tells.
"""

"""Claims about Headrace, each measured and held against a bound: `python -m benchmarks`."""

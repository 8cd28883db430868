"""Traces of offered requests: read, written, generated and reshaped.

`row` has the one record, `read` every file format, `mix` and `generate` make traces from a seed,
`reshape` changes their time, lengths and owners. Rows hold true output lengths: what policies see
of a request is derived elsewhere, without them.
"""

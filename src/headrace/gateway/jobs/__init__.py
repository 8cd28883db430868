"""Deferred requests: handed over by callers, kept in a store of jobs, worked on beside live traffic."""

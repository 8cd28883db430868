"""Journals and logs turned into figures: tables, JSON, one-file HTML. Nothing here decides."""

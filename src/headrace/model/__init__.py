"""Frozen records and life cycles that every room shares.

Records say what is known; they decide nothing and touch nothing. A newcomer starts with `event`
and `effect`, then reads `request`, `demand`, `evidence` and `decision`.
"""

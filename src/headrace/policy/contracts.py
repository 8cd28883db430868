"""The questions that policies answer, in one place.

A policy is its frozen configuration plus methods; the plane keeps whatever state it makes. A
Protocol stands here when there are two real implementations, not before: see `extending` in docs.
"""

from headrace.policy.ordering.orders import Order

__all__ = ["Order"]

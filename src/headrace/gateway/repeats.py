"""Does a request come again? What client libraries and proxies say of it in its headers.

Whoever says so claims less: repeats ask for capacity only up to the retry budget. So a caller's word is
enough, and one that cannot be read is none.
"""

from collections.abc import Mapping

_FIRST = ((b"x-stainless-retry-count", 0), (b"x-envoy-attempt-count", 1))
"""(header, what a first try has there): of the OpenAI and Anthropic clients, and of Envoy."""
_DIGITS_MAX = 9


def is_repeat(told: Mapping[bytes, bytes]) -> bool:
    """Return whether any header says that this is not the first try."""
    return any(_number(told.get(name, b"")) > first for name, first in _FIRST)


def _number(value: bytes) -> int:
    return int(value) if len(value) <= _DIGITS_MAX and value.isdigit() else 0

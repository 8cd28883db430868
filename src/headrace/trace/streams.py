"""Where does each consumer's randomness come from?

One named stream a consumer, so that what one draws never moves what another sees. Nothing in
Headrace draws from any other source.
"""

from hashlib import sha256
from random import Random


def stream(seed: int, *path: str | int) -> Random:
    """Return one consumer's random stream, deaf to what the others draw.

    The path names the consumer; equal paths give equal streams. A slash inside a part is escaped,
    so ("a/b",) and ("a", "b") differ.
    """
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in (seed, *path))
    return Random(sha256("/".join(parts).encode()).digest())  # noqa: S311 - seeded, no secret

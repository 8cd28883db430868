"""Appending to files so that what is there is always whole."""

import os
from contextlib import suppress


def append_whole(file: int, content: bytes, size: int) -> bool:
    """Append to a file of `size` bytes, whole or not at all; say whether it was done."""
    try:
        if os.write(file, content) == len(content):
            return True
    except OSError:
        return False
    with suppress(OSError):
        os.ftruncate(file, size)
    return False

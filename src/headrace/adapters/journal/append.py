"""Appending to files so that what is there is always whole."""

import os
from contextlib import suppress
from errno import ENOSPC


def append(file: int, content: bytes, size: int) -> None:
    """Append to a file of `size` bytes, whole or not at all; raises OSError if it was not done."""
    written = os.write(file, content)
    if written != len(content):  # the disk became full
        with suppress(OSError):
            os.ftruncate(file, size)
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def append_whole(file: int, content: bytes, size: int) -> bool:
    """Append to a file of `size` bytes, whole or not at all; say whether it was done."""
    try:
        append(file, content, size)
    except OSError:
        return False
    return True

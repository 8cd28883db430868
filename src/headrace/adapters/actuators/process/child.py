"""Runs first in each child: asks the kernel to end it with its parent, then becomes the command.

python -I -S child.py PARENT COMMAND...

A program of its own, and not a function that runs between fork and exec: nothing there is safe in a
process with threads. Elsewhere than on Linux it only becomes the command. It imports nothing of ours:
it starts in 20 ms.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_LOST = 70


def main(arguments: list[str]) -> None:
    """Become the command; return never."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - there is no other way to the call

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        if os.getppid() != parent:  # it died before the kernel was asked
            sys.exit(_LOST)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])

"""Where do the frames of a plane's journal go?"""

from typing import Protocol


class Journal(Protocol):
    """A sink that takes every frame at once, or records that it could not."""

    def put(self, frame: bytes, opens: bool) -> None:
        """Keep a frame; `opens`: a new segment starts with it. Never waits, never raises."""
        ...

    def close(self) -> None:
        """Let go of what is open; nothing is put after this."""
        ...

"""How does text reach a terminal that cannot write all of it?"""

import sys
from typing import TextIO


def show(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text; characters that the stream's encoding lacks come out as question marks."""
    out = sys.stdout if file is None else file
    encoding = getattr(out, "encoding", None) or "utf-8"
    out.write((text + end).encode(encoding, "replace").decode(encoding))

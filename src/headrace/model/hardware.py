"""What does one replica run on? Read off the words of its profile: `H100 SXM 80 GB x4`."""

import re

from msgspec import Struct

_MANY = re.compile(
    r"(?P<gpu>.*\S) x(?P<gpus>[1-9][0-9]{0,3})(?: tp(?P<tp>[0-9]+) pp(?P<pp>[0-9]+))?"
)


class Hardware(Struct, frozen=True, kw_only=True):
    """One replica's processors, and how the model is laid out over them."""

    gpu: str
    """What kind they are: `H100 SXM 80 GB`."""
    gpus: int
    """How many; 0: a profile that names no number has no GPU."""
    tp: int
    """Tensor parallel ranks of a stage."""
    pp: int
    """Pipeline stages."""


def hardware_of(words: str) -> Hardware:
    """Return what a profile's `hardware` says.

    `KIND xN`: N GPUs, all of one stage (tensor parallel). `KIND xN tpT ppP`: laid out as it says, where
    T times P is N. Anything else is a kind without GPUs, as one thread of a processor is.
    """
    found = _MANY.fullmatch(words)
    if found is None:
        return Hardware(gpu=words, gpus=0, tp=1, pp=1)
    gpus = int(found["gpus"])
    tp, pp = int(found["tp"] or gpus), int(found["pp"] or 1)
    if tp * pp != gpus:
        raise ValueError(f"hardware {words!r}: tp {tp} times pp {pp} is not {gpus}")
    return Hardware(gpu=found["gpu"], gpus=gpus, tp=tp, pp=pp)

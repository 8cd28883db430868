"""What does a gateway tell an engine of a request, where the engine schedules by our rules?

It travels as scalars beside the request (vLLM's `vllm_xargs`, where it reaches a scheduler class as
`extra_args`). Time left instead of instants, since clocks of two machines differ; the way in the share
tree as one JSON string, since engines take scalars only.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, Path, path
from headrace.units import NS_PER_MS, DurationNs

PREFIX = "headrace_"
"""Every name that is told begins with it. A caller's own never does: they are taken out on the way."""
_TENANT, _CLASS, _WAY = f"{PREFIX}tenant", f"{PREFIX}class", f"{PREFIX}way"
_LEFT, _GAP, _RELEGATED = f"{PREFIX}left_ms", f"{PREFIX}gap_ms", f"{PREFIX}relegated"
_WAY_BYTES = 4_096
_FAR_MS = 366 * 24 * 3_600 * 1_000
_Name = Annotated[str, Meta(max_length=256)]
_Weight = Annotated[int, Meta(ge=1, le=1_000_000)]
_Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_WAY_DECODER = msgspec.json.Decoder(
    Annotated[
        list[tuple[Level, _Name, _Weight, _Counter]], Meta(min_length=1, max_length=len(Level))
    ]
)


class Told(Struct, frozen=True, kw_only=True):
    """A request as the gateway that sent it sees it."""

    tenant: TenantId
    slo_class: ClassName
    way: Path
    """Where it stands in the share tree."""
    counters: tuple[int, ...]
    """The virtual counters on that way as they stood where it was sent."""
    left_ns: DurationNs
    """Until its first-token deadline, from when it was sent; below 0: past it."""
    gap_ns: DurationNs
    """The ITL bound of its class."""
    relegated: bool
    """It can no longer make its deadline."""

    def scalars(self) -> dict[str, str | int]:
        """Return it as it travels: milliseconds rounded down."""
        way = [
            (int(step.level), step.name, step.weight, counter)
            for step, counter in zip(self.way, self.counters, strict=True)
        ]
        return {
            _TENANT: self.tenant,
            _CLASS: self.slo_class,
            _WAY: msgspec.json.encode(way).decode(),
            _LEFT: self.left_ns // NS_PER_MS,
            _GAP: self.gap_ns // NS_PER_MS,
            _RELEGATED: int(self.relegated),
        }


def heard(scalars: Mapping[str, object] | None) -> Told | None:
    """Return what was told with a request; None if nothing of ours was.

    ValueError, without any of the values, if it was and cannot be read.
    """
    if not scalars or _WAY not in scalars:
        return None
    way, tenant, slo_class = (scalars.get(name) for name in (_WAY, _TENANT, _CLASS))
    left, gap, relegated = (scalars.get(name) for name in (_LEFT, _GAP, _RELEGATED))
    if not (isinstance(way, str) and isinstance(tenant, str) and isinstance(slo_class, str)):
        raise ValueError(f"{_WAY}, {_TENANT} and {_CLASS} must be strings")
    if not (isinstance(left, int) and isinstance(gap, int) and isinstance(relegated, int)):
        raise ValueError(f"{_LEFT}, {_GAP} and {_RELEGATED} must be whole numbers")
    if len(way) > _WAY_BYTES or abs(left) > _FAR_MS or not 0 <= gap <= _FAR_MS:
        raise ValueError("metadata beyond its bounds")
    try:
        steps = _WAY_DECODER.decode(way)
    except msgspec.MsgspecError:
        raise ValueError(f"{_WAY} is not as a gateway of this version writes it") from None
    levels = [level for level, *_ in steps]
    if levels != sorted(set(levels)):
        raise ValueError(f"{_WAY} does not go down the share tree")
    return Told(
        tenant=TenantId(tenant),
        slo_class=ClassName(slo_class),
        way=path(*(Link(level, name, weight) for level, name, weight, _ in steps)),
        counters=tuple(counter for *_, counter in steps),
        left_ns=DurationNs(left * NS_PER_MS),
        gap_ns=DurationNs(gap * NS_PER_MS),
        relegated=bool(relegated),
    )

"""What does a gateway tell an engine of a request, where the engine schedules by our rules?

It travels as scalars beside the request (vLLM's `vllm_xargs`, where it reaches a scheduler class as
`extra_args`). Time left instead of instants, since clocks of two machines differ; the way in the share
tree as one JSON string, since engines take scalars only.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from headrace.model.ids import ClassName, TenantId
from headrace.model.paths import Level, Link, Path, path
from headrace.units import NS_PER_MS, DurationNs

PREFIX = "headrace_"
"""Every name that is told begins with it. A caller's own never does: they are taken out on the way."""
_FAR_MS = 366 * 24 * 3_600 * 1_000
_Name = Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z")]
_Weight = Annotated[int, Meta(ge=1, le=1_000_000)]
_Counter = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Steps = Annotated[
    list[tuple[Level, _Name, _Weight, _Counter]], Meta(min_length=1, max_length=len(Level))
]
_STEPS = msgspec.json.Decoder(_Steps)


class _Scalars(Struct, rename=lambda name: PREFIX + name):
    """What travels."""

    tenant: _Name
    slo_class: _Name = field(name=f"{PREFIX}class")
    way: Annotated[str, Meta(max_length=4_096)]
    left_ms: Annotated[int, Meta(ge=-_FAR_MS, le=_FAR_MS)]
    gap_ms: Annotated[int, Meta(ge=0, le=_FAR_MS)]
    relegated: Annotated[int, Meta(ge=0, le=1)]


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
        told = _Scalars(
            tenant=self.tenant,
            slo_class=self.slo_class,
            way=msgspec.json.encode(way).decode(),
            left_ms=self.left_ns // NS_PER_MS,
            gap_ms=self.gap_ns // NS_PER_MS,
            relegated=int(self.relegated),
        )
        scalars: dict[str, str | int] = msgspec.to_builtins(told)
        return scalars


def heard(scalars: Mapping[str, object] | None) -> Told | None:
    """Return what was told with a request; None if nothing of ours was.

    ValueError, without any of the values, if it was and cannot be read.
    """
    if not scalars or f"{PREFIX}way" not in scalars:
        return None
    told = msgspec.convert(scalars, _Scalars)
    steps = _STEPS.decode(told.way)
    levels = [level for level, *_ in steps]
    if levels != sorted(set(levels)) or Level.TENANT not in levels:
        raise ValueError(f"{PREFIX}way does not go down the share tree to a tenant")
    return Told(
        tenant=TenantId(told.tenant),
        slo_class=ClassName(told.slo_class),
        way=path(*(Link(level, name, weight) for level, name, weight, _ in steps)),
        counters=tuple(counter for *_, counter in steps),
        left_ns=DurationNs(told.left_ms * NS_PER_MS),
        gap_ns=DurationNs(told.gap_ms * NS_PER_MS),
        relegated=bool(told.relegated),
    )

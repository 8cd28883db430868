"""Who gives way when memory or slots run out, and how (TOK-4)?

Who: `tied` of a victim key, that of the batching policy or the fair one, `gives_way`; among equals
the cheapest pause for each block that it frees. How: `choose`, the mechanism whose cost to the engine is least, of
those that it has. Costs are engine time: what everybody in the batch waits because one gave way.

Pure, and known to nobody but whoever runs a batch: an engine that can only compute again, like
vLLM, offers `RECOMPUTE` alone, and what is left to it is whom.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.model.engine import Preemption
from headrace.model.ids import TenantId
from headrace.model.profile import Profile
from headrace.policy.batching.knobs import Entry, Key
from headrace.units import BLOCK_TOKENS, Blocks, Bytes, DurationNs, Ps, Tokens, blocks_for, ps_to_ns

_GB = 1_000_000_000
_GIB = 1 << 30
_PS_PER_S = 1_000_000_000_000
_NO_USE = DurationNs(1 << 62)  # of a pause that frees nothing


class Victims(StrEnum):
    """By whose key requests give way."""

    POLICY = "policy"
    """That of the batching policy."""
    FAIR = "fair"
    """`gives_way`, whatever the batching policy says."""


class Whole(StrEnum):
    """Which requests start only where free KV blocks hold all that they have to compute: their prompt,
    and the output made before they gave way.

    The blocks are looked for, not set aside: those that run may take them before it does. Any other
    request starts where its first chunk fits.
    """

    NEVER = "never"
    """None: a prompt may give way, and be lost, half computed, over and over where memory is short."""
    RESUMED = "resumed"
    """Those that gave way."""
    ALL = "all"
    """Every one, as vLLM's `scheduler_reserve_full_isl` says by default."""


class Offers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests may give way in an engine, and what it has for that."""

    mechanisms: Annotated[tuple[Preemption, ...], Meta(min_length=1)] = (Preemption.RECOMPUTE,)
    """`recompute` is always among them: a host pool may be full, and a kept request frees no memory.
    That alone is what vLLM does."""
    victims: Victims = Victims.POLICY
    """By whose key requests give way. That of the batching policy: under vLLM's, the last to come."""
    by_cost: bool = True
    """Take the cheapest. False: the first of `mechanisms` that is possible, whatever it costs."""
    whole: Whole = Whole.ALL
    """Which requests start only where all that they have to compute fits: as in vLLM, every one."""
    host_gb_per_s: Annotated[float, Meta(gt=0, le=10_000)] = 20.0
    """10^9 bytes a second between the KV pool and the host, one way. 20: PCIe 4 x16 in large pieces;
    copies of single blocks of single layers reach less than half of it."""
    host_gib: Annotated[float, Meta(ge=0, le=100_000)] = 64.0
    """GiB of host memory for KV. 64: about what a machine spares for each of its GPUs."""

    def __post_init__(self) -> None:
        """Refuse an engine that could be stuck."""
        if Preemption.RECOMPUTE not in self.mechanisms:
            raise ValueError("mechanisms must have recompute: there may be no room for another")
        if len(set(self.mechanisms)) < len(self.mechanisms):
            raise ValueError("mechanisms names one twice")

    def has(self, mechanism: Preemption) -> bool:
        """Return whether it is offered."""
        return mechanism in self.mechanisms

    def host_blocks(self, profile: Profile) -> Blocks:
        """Return how many KV blocks the host holds; 0 where nothing is swapped."""
        if not self.has(Preemption.SWAP):
            return Blocks(0)
        return Blocks(round(self.host_gib * _GIB) // block_bytes(profile))

    def transfer_ps(self, blocks: int, profile: Profile) -> Ps:
        """Return how long blocks take one way, in ps, rounded down once."""
        return Ps(blocks * block_bytes(profile) * _PS_PER_S // round(self.host_gb_per_s * _GB))


RECOMPUTE_ONLY = Offers()
"""What vLLM does."""


class Held(Struct, frozen=True, kw_only=True, gc=False):
    """What a request holds on the GPU."""

    computed: Tokens
    """Tokens whose KV it has."""
    shared: Tokens
    """Leading ones of them whose blocks others use too: these stay."""
    blocks: Blocks
    """Its blocks, shared ones included."""


class Choice(Struct, frozen=True, kw_only=True, gc=False):
    """How one request gives way, and what each way would have cost; None: not possible here."""

    mechanism: Preemption
    keep_ns: DurationNs | None
    out_ns: DurationNs | None
    """Of a swap: the way to the host."""
    in_ns: DurationNs | None
    """Of a swap: the way back. What the prefix cache may still have by then is not counted on."""
    recompute_ns: DurationNs
    """Prefill of what it holds and nobody shares."""
    frees: Blocks
    """What others get of it."""

    @property
    def cost_ns(self) -> DurationNs:
        """Engine time that the chosen way takes from everybody."""
        return _costs(self)[self.mechanism]

    @property
    def per_block_ns(self) -> DurationNs:
        """The same for each block that it frees."""
        return DurationNs(self.cost_ns // self.frees) if self.frees else _NO_USE


def choose(
    held: Held, offers: Offers, profile: Profile, *, host_free: int, for_slot: bool = False
) -> Choice:
    """Return how a request gives way: for its memory, or only `for_slot`.

    Keeping costs nothing and is possible for a slot alone. A swap takes all its blocks over the link
    and back, its shared ones too, since these may be gone by then; it needs room on the host. To
    compute again takes the prefill work of what is not shared, as the profile counts it. Equal costs:
    the one declared first.
    """
    copies = blocks_for(held.computed)
    swaps = offers.has(Preemption.SWAP) and 0 < copies <= host_free
    way = DurationNs(ps_to_ns(offers.transfer_ps(copies, profile))) if swaps else None
    keeps = for_slot and offers.has(Preemption.KEEP)
    recompute = profile.work_ns(held.computed - held.shared, held.shared, 0)
    priced = Choice(
        mechanism=Preemption.RECOMPUTE,
        keep_ns=DurationNs(0) if keeps else None,
        out_ns=way,
        in_ns=way,
        recompute_ns=DurationNs(recompute),
        frees=Blocks(held.blocks - held.shared // BLOCK_TOKENS),
    )
    costs = _costs(priced)
    able = [mechanism for mechanism in offers.mechanisms if mechanism in costs]
    best = min(able, key=costs.__getitem__) if offers.by_cost else able[0]
    return priced if best is priced.mechanism else replace(priced, mechanism=best)


def _costs(choice: Choice) -> dict[Preemption, DurationNs]:
    """Return the cost of every way that there is."""
    costs = {Preemption.RECOMPUTE: choice.recompute_ns}
    if choice.keep_ns is not None:
        costs[Preemption.KEEP] = choice.keep_ns
    if choice.out_ns is not None and choice.in_ns is not None:
        costs[Preemption.SWAP] = DurationNs(choice.out_ns + choice.in_ns)
    return costs


def block_bytes(profile: Profile) -> Bytes:
    """Return the size of a KV block."""
    return Bytes(profile.kv_bytes_per_token * BLOCK_TOKENS)


def gives_way(entry: Entry) -> Key:
    """Return the victim key that is fair: the greatest gives way.

    Whoever is below its share goes last, however relegated; then the relegated go first, then the
    loosest class.
    """
    return (not entry.below_share, entry.relegated, entry.gap_ns)


def yields(running: Entry, waiting: Entry) -> bool:
    """Return whether a running request gives its slot to one that waits.

    Only to one that is strictly more urgent by what never changes, its class and relegation, so that
    two can never take turns in pausing each other; and never if it is below its share.
    """
    urgency = (waiting.relegated, waiting.gap_ns)
    return not running.below_share and (running.relegated, running.gap_ns) > urgency


def marked(entries: Sequence[Entry]) -> list[Entry]:
    """Return running requests with those marked whose tenant is below its share.

    That is the tenant with the least counter of those that stand under one node of the share tree, if
    others with strictly greater ones run beside it. Counters of different nodes do not compare.
    """
    first = entries[0]
    if all((each.among, each.tenant) == (first.among, first.tenant) for each in entries):
        return list(entries)  # nobody to compare with
    counters: dict[str, dict[TenantId, int]] = {}
    for entry in entries:
        counters.setdefault(entry.among, {})[entry.tenant] = entry.counter
    below = {(node, tenant) for node, of in counters.items() for tenant in _poorest(of)}
    return [
        replace(entry, below_share=True) if (entry.among, entry.tenant) in below else entry
        for entry in entries
    ]


def _poorest(counters: dict[TenantId, int]) -> list[TenantId]:
    """Return the tenant whose counter is strictly the least, if any."""
    least = min(counters.values())
    poorest = [tenant for tenant, counter in counters.items() if counter == least]
    return poorest if len(poorest) == 1 < len(counters) else []


def giving_way(
    entries: Sequence[Entry],
    key: Callable[[Entry], Key],
    pause: Callable[[int], Key],
    most: int = 1,
) -> list[int]:
    """Return which of the entries give way first, at least `most` of them, as far as there are.

    The greatest key first; of equals the one with the least `pause`, asked for only where keys tie.
    """
    keys = [key(entry) for entry in marked(entries)]
    ranked = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    found: list[int] = []
    for _, equals in groupby(ranked, key=keys.__getitem__):
        tied = list(equals)
        found += tied if len(tied) == 1 else sorted(tied, key=pause)
        if len(found) >= most:
            break
    return found


def tied(entries: Sequence[Entry], key: Callable[[Entry], Key]) -> list[int]:
    """Return which of the entries have the greatest key: one of them gives way."""
    keys = [key(entry) for entry in marked(entries)]
    greatest = max(keys)
    return [nth for nth, one in enumerate(keys) if one == greatest]

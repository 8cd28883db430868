"""What does an engine's load path tell? Prometheus' text, or llama.cpp's slots, as numbers of ours.

A scanner for the few names that are wanted, not a parser: real pages have a thousand lines, most of
them buckets, and reading them all once a second would hold up the streams of everybody.
"""

import math
import re
from functools import cache

import msgspec
from msgspec import Struct

from headrace.adapters.engines.kinds import CacheInfo, Signal, Traits
from headrace.model.engine import EngineKind, Snapshot
from headrace.model.ids import Incarnation, ReplicaName
from headrace.units import BLOCK_TOKENS, Blocks, InstantNs

_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


_COUNT_MAX = 2**53
"""Beyond it a page's numbers, which are floats, count nothing any more: they are not told."""
_DIGITS_MAX = len(str(_COUNT_MAX))


class Load(Struct, frozen=True, kw_only=True):
    """What an engine says of itself; blocks are ours, of `BLOCK_TOKENS` tokens. None: not told."""

    running: int | None = None
    waiting: int | None = None
    kv_blocks_used: int | None = None
    kv_blocks_total: int | None = None
    preemptions: int | None = None
    prefix_tokens_queried: int | None = None
    prefix_tokens_hit: int | None = None
    missing: tuple[Signal, ...] = ()
    """What it should tell and does not."""

    def snapshot(self, replica: ReplicaName, life: Incarnation, asked_at: InstantNs) -> Snapshot:
        """Return it as the plane takes it, as of when it was asked for: never newer than it is."""
        used, total = self.kv_blocks_used, self.kv_blocks_total
        return Snapshot(
            replica=replica,
            incarnation=life,
            observed_at=asked_at,
            running=self.running,
            waiting=self.waiting,
            kv_blocks_used=None if used is None else Blocks(used),
            kv_blocks_total=None if total is None else Blocks(total),
            preemptions=self.preemptions,
            prefix_tokens_queried=self.prefix_tokens_queried,
            prefix_tokens_hit=self.prefix_tokens_hit,
        )


class _Sum(Struct):
    total: float = 0.0
    series: int = 0


def load_of(traits: Traits, page: bytes) -> Load:
    """Return what a page of metrics tells. Series of one name (an engine's ranks) are added up.

    A share of the KV cache is the mean over its series, which are equally large.
    """
    found = _samples(traits, page)
    told: dict[Signal, _Sum] = {}
    for signal, names in traits.names.items():
        for name in names:
            one = found.get(name) or found.get(f"{name}_total")
            if one is not None and one.total <= _COUNT_MAX:
                told[signal] = one
                break
    total = _kv_blocks(told, traits.cache_info, page, traits.prefixes)
    share = told.get(Signal.KV_SHARE)
    used = None
    if total is not None and share is not None:
        used = round(min(1.0, share.total / share.series) * total)
    return Load(
        running=_count(told, Signal.RUNNING),
        waiting=_count(told, Signal.WAITING),
        kv_blocks_used=used,
        kv_blocks_total=total,
        preemptions=_count(told, Signal.PREEMPTIONS),
        prefix_tokens_queried=_queried(told),
        prefix_tokens_hit=_hit(told),
        missing=tuple(sorted(traits.expected - told.keys())),
    )


def kind_of(page: bytes, kinds: dict[EngineKind, tuple[str, ...]]) -> EngineKind | None:
    """Return whose metrics a page has: of the first kind with a line that begins as its names do."""
    lines = b"\n" + page
    for kind, prefixes in kinds.items():
        if any(b"\n" + prefix.encode() in lines for prefix in prefixes):
            return kind
    return None


class _Slot(Struct):
    is_processing: bool


_SLOTS = msgspec.json.Decoder(list[_Slot])


def load_of_slots(body: bytes) -> Load:
    """Return what a list of slots tells: who runs, and nothing of who waits; raises DecodeError."""
    return Load(
        running=sum(slot.is_processing for slot in _SLOTS.decode(body)), missing=(Signal.WAITING,)
    )


def _samples(traits: Traits, page: bytes) -> dict[str, _Sum]:
    """Return the sums of all wanted names on a page, `_total` still at their ends."""
    found: dict[str, _Sum] = {}
    wanted = tuple(sorted({name for names in traits.names.values() for name in names}))
    if not wanted:
        return found
    for name, value in _scanner(traits.prefixes, wanted).findall(page):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number) and number >= 0:
            one = found.setdefault(name.decode(), _Sum())
            one.total += number
            one.series += 1
    return found


@cache  # one for each kind
def _scanner(prefixes: tuple[str, ...], names: tuple[str, ...]) -> re.Pattern[bytes]:
    begins = "|".join(map(re.escape, prefixes))
    wanted = "|".join(map(re.escape, names))
    pattern = rf"^(?:{begins})((?:{wanted})(?:_total)?)(?:\{{[^\n]*\}})?[ \t]+(\S+)"
    return re.compile(pattern.encode(), re.MULTILINE)


def _kv_blocks(
    told: dict[Signal, _Sum], info: CacheInfo | None, page: bytes, prefixes: tuple[str, ...]
) -> int | None:
    """Return the size of the KV cache in blocks of ours, however it is told."""
    tokens = _count(told, Signal.KV_TOKENS)
    if tokens is None:
        blocks, size = _count(told, Signal.KV_BLOCKS), told.get(Signal.KV_BLOCK_TOKENS)
        if blocks is not None and size is not None:
            tokens = _known(blocks * size.total / size.series)
    if tokens is None and info is not None:
        tokens = _told_size(info, page, prefixes)
    return None if tokens is None else tokens // BLOCK_TOKENS


def _told_size(info: CacheInfo, page: bytes, prefixes: tuple[str, ...]) -> int | None:
    """Return the tokens of a KV cache that labels tell, over all series."""
    tokens = None
    for labels in _labelled(prefixes, info.name).findall(page):
        told = dict(_LABEL.findall(labels))
        size = told.get(info.block_tokens.encode(), b"")
        blocks = told.get(info.blocks.encode(), b"")
        if _is_number(size) and _is_number(blocks):
            tokens = (tokens or 0) + int(size) * int(blocks)
    return None if tokens is None else _known(tokens)


@cache
def _labelled(prefixes: tuple[str, ...], name: str) -> re.Pattern[bytes]:
    begins = "|".join(map(re.escape, prefixes))
    pattern = rf"^(?:{begins}){re.escape(name)}\{{([^\n]*)\}}[ \t]"
    return re.compile(pattern.encode(), re.MULTILINE)


def _is_number(label: bytes) -> bool:
    return label.isdigit() and len(label) <= _DIGITS_MAX


def _known(number: float) -> int | None:
    return round(number) if number <= _COUNT_MAX else None


def _count(told: dict[Signal, _Sum], signal: Signal) -> int | None:
    one = told.get(signal)
    return None if one is None else round(one.total)


def _hit(told: dict[Signal, _Sum]) -> int | None:
    blocks, size = _count(told, Signal.PREFIX_HIT_BLOCKS), told.get(Signal.KV_BLOCK_TOKENS)
    if blocks is not None and size is not None:
        return _known(blocks * size.total / size.series)
    return _count(told, Signal.PREFIX_HIT)


def _queried(told: dict[Signal, _Sum]) -> int | None:
    """Return the tokens looked up, added up where found and missed are told apart."""
    missed, hit = _count(told, Signal.PREFIX_MISSED), _count(told, Signal.PREFIX_HIT)
    if missed is not None and hit is not None:
        return _known(missed + hit)
    return _count(told, Signal.PREFIX_QUERIED)

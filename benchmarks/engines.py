"""Two engines that others measured: profile, admission rules and batching as they ran them.

*Small* is a Llama-7B on an A10G as in the measurements of VTC (Sheng et al. 2024): prompts first, a look
at the waiting ones every ten decode steps, outputs reserved by the peak they lead to. *Large* is a
Llama-3 8B on an A100 80 GB: kernel times, about 1.5 times as fast as an engine serves, all of an output
reserved. Benchmarks hold our policies on them against published figures.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from headrace.model.ids import Incarnation, ReplicaName
from headrace.model.profile import DecodeFit, MixedFit, Profile
from headrace.model.table import TableFit
from headrace.policy.batching import Batching, ChunkedPrefill, PrefillFirst
from headrace.replica.core import Replica
from headrace.replica.job import Finished, FirstTokenMade, Job
from headrace.replica.rules import Reserve, Rules
from headrace.units import BLOCK_TOKENS, InstantNs, Tokens

_SLOTS = 256
_ROUNDING = _SLOTS * BLOCK_TOKENS
"""Tokens that a pool holds besides: rules count tokens, a pool counts blocks."""

GEMM_MS = (
    (1, 9.74), (64, 9.85), (80, 11.38), (128, 11.64), (160, 15.95), (192, 16.86), (256, 16.97),
    (384, 22.15), (512, 29.66), (768, 42.8), (1_024, 55.64), (2_048, 106.2), (4_096, 212.0),
    (8_192, 429.8), (16_384, 860.0),
)  # fmt: skip
"""Matrix products of a step by its tokens: Llama-3.1 8B, A100 80 GB, kernels of vLLM 0.14."""
FIXED_MS = 3.5
"""What a step takes besides: sampling, norms, the processor. An assumption."""


class Engine(Struct, frozen=True, kw_only=True):
    """An engine as it was run."""

    profile: Profile
    rules: Rules
    batching: Batching

    def start(self, *, fast_forward: bool = True) -> Replica:
        """Return an idle one."""
        return Replica(
            ReplicaName(self.profile.name),
            Incarnation(1),
            self.profile,
            self.batching,
            fast_forward=fast_forward,
            rules=self.rules,
        )


SMALL = Engine(
    profile=Profile(
        name="a10g-7b-measured",
        source="VTC's cost profile of an A10G, mean absolute error 4 % (Sheng et al. 2024)",
        hardware="A10G 24 GB x1",
        model="llama-7b",
        kv_bytes_per_token=524_288,
        kv_capacity_tokens=Tokens(10_000 + _ROUNDING),
        max_running=_SLOTS,
        reference_batch=19,
        reference_context=Tokens(512),
        decode=DecodeFit(a_ms=15.29, c_ms=0.2542, d_ms=0.00216),
        # Of steps with prompts only: there are no others.
        mixed=MixedFit(a_ms=1.0, knee=0, b_ms=0.214, c_ms=0.0, d_ms=0.0, e_ms=0.0),
    ),
    rules=Rules(admit_every=10, reserve=Reserve.PEAK, capacity=Tokens(10_000)),
    batching=PrefillFirst(token_budget=1_666),
)

LARGE = Engine(
    profile=Profile(
        name="a100-8b-table",
        source="kernel times of AIConfigurator (ai-dynamo/aiconfigurator), and 3.5 ms a step assumed",
        hardware="A100 SXM 80 GB x1",
        model="llama-3.1-8b",
        kv_bytes_per_token=131_072,
        kv_capacity_tokens=Tokens(430_000 + _ROUNDING),
        max_running=_SLOTS,
        token_budget=512,
        reference_batch=256,
        table=TableFit(
            points=tuple((tokens, FIXED_MS + gemm) for tokens, gemm in GEMM_MS),
            h_ms=0.6,
            c_ms=0.0053,
            d_ms=8.1e-5,
            e_ms=2 * 1.55e-6,
        ),
    ),
    rules=Rules(reserve=Reserve.WHOLE, capacity=Tokens(430_000)),
    batching=ChunkedPrefill(),
)


def chunked(tokens: int) -> Engine:
    """Return the large engine with steps of so many tokens."""
    return replace(LARGE, batching=ChunkedPrefill(token_budget=tokens))


UNMIXED = replace(LARGE, batching=PrefillFirst())
"""The large engine with whole prompts first, 8,192 tokens of them at once."""


def token_times(engine: Engine, jobs: Sequence[tuple[InstantNs, Job]]) -> list[list[InstantNs]]:
    """Run jobs alone on an engine, step by step; return when each made its tokens, job by job.

    `jobs` by arrival. An engine that refuses one of them is a mistake of the benchmark.
    """
    replica = engine.start(fast_forward=False)
    times: dict[int, list[InstantNs]] = {job.attempt: [] for _, job in jobs}

    def live_to(now: int) -> None:
        while (due := replica.next_event()) is not None and due <= now:
            for event in replica.advance(due):
                _note(times, event)
            for attempt, made in replica.progress(due):
                if made > len(times[attempt]):
                    times[attempt].append(due)

    for at, job in jobs:
        live_to(at)
        refused = replica.submit(job, at)
        assert refused is None, f"{refused=}"
    live_to(1 << 62)
    for _, job in jobs:
        assert len(times[job.attempt]) == job.output_tokens, f"{job=}"
    return list(times.values())


def _note(times: dict[int, list[InstantNs]], event: FirstTokenMade | Finished) -> None:
    """Note a first or a last token; those between are told as progress."""
    mine = times[event.attempt]
    if isinstance(event, FirstTokenMade):
        mine.append(event.at)
    elif len(mine) < event.usage.output_tokens and event.timing.last_at is not None:
        mine.append(event.timing.last_at)

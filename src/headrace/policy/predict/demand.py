"""What will one request cost?

Turns a request, a hardware profile and an output forecast into the one `Demand` that every decider
reads. Decides nothing.
"""

from headrace.model.budget import Take
from headrace.model.demand import Demand
from headrace.model.deployment import ModelSpec, PoolSpec
from headrace.model.request import Request
from headrace.policy.predict.output import REVISION
from headrace.units import BLOCK_TOKENS, NS_PER_S, Bytes, DurationNs, Tokens, WorkNs, blocks_for


def output_limit(
    request: Request, model: ModelSpec, pool: PoolSpec, cap: Tokens | None = None
) -> Tokens:
    """Return the most output tokens this request may make on a pool.

    The least of its own cap, the model's, what the context leaves, what the KV pool holds, and `cap`:
    what it is given at most for other reasons.
    """
    holds = pool.profile.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    room = min(model.context_limit, holds) - request.input_tokens
    asked = model.output_limit if request.max_output is None else request.max_output
    most = min(asked, model.output_limit, room)
    return Tokens(max(1, most if cap is None else min(most, cap)))


def demand(
    request: Request,
    model: ModelSpec,
    pool: PoolSpec,
    forecast: tuple[int, int],
    cap: Tokens | None = None,
) -> Demand:
    """Return a request's demand on one pool (DEM-1, DEM-2).

    `forecast` is the predicted (p50, p90) output; the caller's own limit caps both, as does `cap`. Work is as if
    nothing were cached: prefix credit belongs to routing. Residency counts prefill and p50 decode
    steps at the profile's operating batch.
    """
    profile, given = pool.profile, request.input_tokens
    limit = output_limit(request, model, pool, cap)
    p50, p90 = min(forecast[0], limit), min(forecast[1], limit)
    prefill = profile.prefill_ns(given, 0, 0, 0, profile.token_budget)
    residency = prefill + p50 * profile.reference_step_ns
    kv_bytes = (given + p90) * profile.kv_bytes_per_token * request.fan_out
    return Demand(
        input_tokens=given,
        cached_tokens=Tokens(0),
        output_p50=Tokens(p50),
        output_p90=Tokens(p90),
        prefill_ns=prefill,
        work_p50_ns=WorkNs(profile.work_ns(given, 0, p50) * request.fan_out),
        work_p90_ns=WorkNs(profile.work_ns(given, 0, p90) * request.fan_out),
        kv_blocks=blocks_for((given + p90) * request.fan_out),
        kv_bytes=Bytes(kv_bytes),
        kv_byte_seconds=kv_bytes * residency // NS_PER_S,
        residency_ns=DurationNs(residency),
        fan_out=request.fan_out,
        input_revision=request.input_revision,
        output_revision=REVISION,
        profile_revision=profile.name,
        model_revision=pool.revision,
        quantization=model.quantization,
        adapter=request.model if request.model in model.adapters else "",
    )


def take(
    request: Request, model: ModelSpec, pool: PoolSpec, need: Demand, cap: Tokens | None = None
) -> Take:
    """Return what is reserved for a request: input plus the output its caller allows, else p90; p90 of work."""
    output = need.output_p90
    if request.max_output is not None:
        output = output_limit(request, model, pool, cap)
    branches = max(1, request.fan_out)
    return Take(
        tokens=Tokens((request.input_tokens + output) * branches),
        work_ns=need.work_p90_ns,
        micro_usd=model.cost(request.input_tokens, 0, output, branches),
    )

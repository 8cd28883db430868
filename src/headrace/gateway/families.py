"""Which metrics are there, with which labels, and what does each mean?

One table; `docs/operations.md` repeats it and a test compares the two. Every label is bounded:
tenants, classes, models, pools and replicas come from the configuration and the live fleet, reasons
and kinds from closed lists. What is not known has no sample: absent is not zero.
"""

from enum import StrEnum

from msgspec import Struct

PREFIX = "headrace_"


class Kind(StrEnum):
    """How a family is to be read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Family(Struct, frozen=True):
    """One metric with all its series."""

    kind: Kind
    about: str
    labels: tuple[str, ...] = ()


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_WHO = ("tenant", "class")
_WHY = (*_WHO, "reason")
_QUEUE = ("model", "class")
_TENANT = ("model", "tenant")
_REPLICA = ("model", "pool", "replica")
_ENGINE = ("pool", "replica")
_CLASS = ("class",)

FAMILIES: dict[str, Family] = {
    # Offered and admission: every offered request is admitted, rejected or left before; they add up.
    "offered_requests": Family(_C, "Requests that asked for an answer, retries included.", _WHO),
    "offered_input_tokens": Family(_C, "Their prompt tokens, as estimated on arrival.", _WHO),
    "offered_predicted_output_tokens": Family(
        _C, "Their output tokens as predicted on arrival (p50).", _WHO
    ),
    "offered_work_seconds": Family(
        _C, "Their work as predicted on arrival, in GPU seconds of one replica.", _WHO
    ),
    "admitted_requests": Family(
        _C, "Requests that were let in; deferred ones once they were sent to a replica.", _WHO
    ),
    "deferred_requests": Family(
        _C,
        "Of the offered, those put aside to be answered later: offered then, and not again.",
        _WHO,
    ),
    "deferred_taken_up_requests": Family(
        _C,
        "Of the admitted, those that were deferred; one that an engine failed at is taken up again.",
        _WHO,
    ),
    "rejected_requests": Family(_C, "Requests refused at the door.", _WHY),
    "left_before_admission_requests": Family(_C, "Callers gone before a decision.", _WHO),
    "dispatched_attempts": Family(_C, "Attempts sent to a replica.", _WHO),
    "ended_requests": Family(
        _C, "Admitted requests that are over, by outcome.", (*_WHO, "outcome")
    ),
    "ended_early_requests": Family(
        _C,
        "Those of them that ended for a reason of ours: expired, evicted, replica lost, shut down.",
        _WHY,
    ),
    "degraded_requests": Family(
        _C,
        "Of the admitted, those in a lesser form, by its level on their class's ladder.",
        (*_WHO, "level"),
    ),
    "left_out_parts": Family(
        _C, "Optional parts of prompts that were left out of requests let in.", _WHO
    ),
    "output_tokens": Family(_C, "Tokens made for admitted requests, by the engine's count.", _WHO),
    "lent_turns": Family(
        _C,
        "Attempts of them that had their turn before a tenant further under its share, which could "
        "wait.",
        _WHO,
    ),
    "relegated_requests": Family(
        _C,
        "Requests that waited past their latest start, and went behind their tenant's others.",
        _WHO,
    ),
    # Goodput: the numerators; attainment is met over admitted, goodput a rate of these.
    "met_requests": Family(_C, "Requests that succeeded inside every declared bound.", _WHO),
    "met_output_tokens": Family(_C, "Output tokens of those.", _WHO),
    "met_work_seconds": Family(_C, "Work of those, as if nothing had been cached.", _WHO),
    "spend_usd": Family(
        _C, "Paid to hosted engines, by their usage and configured price.", ("tenant", "model")
    ),
    "decisions": Family(_C, "Decisions of the plane.", ("decision",)),
    "shadow_decisions": Family(
        _C,
        "Requests by what the real plane decided and what the shadow would have: `admit`, or the "
        "reason of a refusal; absent without a shadow.",
        ("real", "shadow"),
    ),
    "shadow_running": Family(
        _G,
        "0 once the shadow has failed, else 1; absent without a shadow.",
    ),
    "audited_refusals": Family(
        _C,
        "Requests let in that a gate in audit mode would have refused.",
        ("class", "gate", "reason"),
    ),
    "soft_limit_requests": Family(
        _C,
        "Requests let in beyond a budget's soft limit, by budget such as `tokens/day`.",
        ("tenant", "budget"),
    ),
    "edge_refused_requests": Family(
        _C,
        "Requests refused before the plane saw them; they are not among the offered.",
        ("reason",),
    ),
    "token_counts": Family(
        _C,
        "Requests whose model has a tokenizer: `counted`, `cached`, or why they were estimated: "
        "`unfit`, `busy`, `late`, `failed`; absent without one.",
        ("model", "result"),
    ),
    "ignored_headers": Family(
        _C, "Routing headers of callers that were not believed.", ("header",)
    ),
    "ignored_events": Family(
        _C, "Late, repeated or unknown events, expected and without effect.", ("kind",)
    ),
    # Latency as callers saw it, of admitted requests that made a token.
    "ttft_seconds": Family(_H, "From arrival to the first token.", _CLASS),
    "itl_seconds": Family(
        _H, "Gaps between tokens, all of them pooled; zero within a frame.", _CLASS
    ),
    "max_stall_seconds": Family(_H, "Largest gap of each answer.", _CLASS),
    "e2e_seconds": Family(_H, "From arrival to the end of the answer.", _CLASS),
    "queue_seconds": Family(_H, "From arrival to dispatch.", _CLASS),
    "predicted_slack_seconds": Family(
        _H,
        "Slack to the first-token bound as predicted on arrival; below zero, the deadline gate "
        "refuses.",
        _CLASS,
    ),
    "slack_error_seconds": Family(
        _H,
        "Actual less predicted slack of admitted requests; below zero, the first token came later "
        "than forecast and margin allowed for.",
        _CLASS,
    ),
    # Queue and fairness.
    "queued_requests": Family(_G, "Requests that wait.", _QUEUE),
    "queued_work_seconds": Family(_G, "Predicted work that waits.", _QUEUE),
    "queue_age_seconds": Family(
        _G, "Age of the request that has waited longest; absent while none waits.", _QUEUE
    ),
    "queue_earliest_slack_seconds": Family(
        _G,
        "Time until the most urgent waiting request must be sent to meet its first-token bound; "
        "absent while none with a bound waits.",
        _QUEUE,
    ),
    "degrade_level": Family(
        _G,
        "Level at which a class is served now; this and the next ones once a request of it came that "
        "agreed to less.",
        _QUEUE,
    ),
    "degrade_level_seconds": Family(_C, "Time that a class was at each level.", (*_QUEUE, "level")),
    "degrade_recovery_seconds": Family(
        _G,
        "How long it took the last time from leaving level 0 until it was back there; absent before.",
        _QUEUE,
    ),
    "service": Family(
        _C,
        "Service that a tenant had, in the unit of the cost function (millionths of an input token, "
        "ns of GPU time), weights apart: prompts from their first token, output as of the last tick.",
        (*_TENANT, "cost"),
    ),
    "served_input_tokens": Family(_C, "Input tokens computed for it.", _TENANT),
    "served_cached_tokens": Family(
        _C, "Input tokens that a prefix cache had for it, as expected until usage tells.", _TENANT
    ),
    "served_output_tokens": Family(_C, "Output tokens made for it.", _TENANT),
    "tenant_virtual_service": Family(
        _G,
        "Service charged to a tenant by weight, in the unit of the cost that counts; another "
        "revision of the cost starts anew.",
        (*_TENANT, "cost"),
    ),
    "tenant_queued_requests": Family(_G, "A tenant's requests that wait.", _TENANT),
    "tenant_queued_work_seconds": Family(_G, "A tenant's predicted work that waits.", _TENANT),
    "tenant_queue_emptied": Family(
        _C,
        "Times that a tenant's last waiting request left the queue: who waits at two scrapes "
        "without one in between has waited all the time.",
        _TENANT,
    ),
    "tenant_starvation_seconds": Family(
        _G,
        "Time for which a tenant that waits has had no turn; absent while it does not wait.",
        _TENANT,
    ),
    "tenant_share_deviation": Family(
        _G,
        "Share of the service of the last minute less the fair share, among tenants that competed "
        "for turns all the while; absent unless two did, or before the second scrape.",
        _TENANT,
    ),
    "work_rate": Family(
        _G,
        "Queued work seconds that one replica takes on in a second, as measured under load.",
        ("model", "pool"),
    ),
    # Replicas: our own books, and what each last said of itself.
    "ready_replicas": Family(_G, "Replicas that are ready.", ("model", "pool")),
    "replica_pending_prefill_seconds": Family(
        _G, "Predicted prefill sent that has shown no first token yet.", _REPLICA
    ),
    "replica_decodes": Family(_G, "Streams past their first token.", _REPLICA),
    "replica_kv_blocks_reserved": Family(_G, "KV blocks that we have reserved there.", _REPLICA),
    "replica_kv_blocks_capacity": Family(_G, "KV blocks that may be reserved there.", _REPLICA),
    "replica_expected_cached_tokens": Family(
        _C, "Prompt tokens expected in its prefix cache, of attempts whose usage told.", _REPLICA
    ),
    "replica_told_cached_tokens": Family(
        _C, "Prompt tokens of the same attempts that were there, by their usage.", _REPLICA
    ),
    "replica_prefix_reliability": Family(
        _G, "Share of what was expected cached that was, of late; absent if not told.", _REPLICA
    ),
    "replica_report_age_seconds": Family(
        _G, "Age of its last report; absent if it never reported.", _REPLICA
    ),
    "replica_kv_blocks_used": Family(
        _G,
        "KV blocks in use by its own account; absent if it does not tell, or is stale.",
        _REPLICA,
    ),
    "replica_running": Family(
        _G, "Requests running by its own account; absent as above.", _REPLICA
    ),
    "replica_waiting": Family(
        _G, "Requests waiting by its own account; absent as above.", _REPLICA
    ),
    "replica_prefix_hit_tokens": Family(
        _C, "Prompt tokens found in its prefix cache; absent as above.", _REPLICA
    ),
    "replica_prefix_queried_tokens": Family(
        _C, "Prompt tokens looked up there; absent as above.", _REPLICA
    ),
    "replica_preemptions": Family(_C, "Preemptions; absent as above.", _REPLICA),
    "replica_signals_missing": Family(
        _G,
        "1 for each signal of its load that an engine should tell and does not, or for `path`, "
        "`unreadable`, `silent` if it tells nothing; absent while all is well.",
        (*_ENGINE, "signal"),
    ),
    "engine_kv_blocks_held": Family(
        _G,
        "Blocks of its KV cache that an engine has told of and that are there; this and the next ones "
        "only of engines with `kv_events`.",
        _ENGINE,
    ),
    "engine_kv_blocks_stored": Family(_C, "Blocks that entered its KV cache.", _ENGINE),
    "engine_kv_blocks_removed": Family(_C, "Blocks that left it, evicted.", _ENGINE),
    "engine_kv_resets": Family(
        _C,
        "Times that what was known of its cache no longer counted: `cleared` or `restarted` by the "
        "engine, or `lost`, as its events were.",
        (*_ENGINE, "reason"),
    ),
    "engine_kv_event_gaps": Family(
        _C, "Times that events of it were missed, had later or not.", _ENGINE
    ),
    "engine_kv_events_unread": Family(
        _C,
        "Messages that were `malformed`, events of an `unknown` kind, and blocks that do not count: "
        "`elsewhere` (other memory or layers), or `left_out` beyond those kept.",
        (*_ENGINE, "reason"),
    ),
    # The process.
    "live_requests": Family(_G, "Requests that wait or run."),
    "ready": Family(_G, "1 if newcomers can be served here, else 0."),
    "draining": Family(_G, "1 if newcomers are refused while who is in goes on, else 0."),
    "frozen": Family(_G, "1 if changes of policy and of scale are frozen, else 0."),
    "policy_revision": Family(_G, "Revision of the policy that newcomers are decided on by."),
    "policy_info": Family(
        _G,
        "1, with what the policy is called.",
        ("revision", "mode", "wait", "ordering", "cost", "goodput_formula"),
    ),
    "build_info": Family(_G, "1, with the version.", ("version",)),
    "journal_dropped_frames": Family(
        _C, "Journal frames that could not be kept; absent without a journal."
    ),
    "journal_unread_segments": Family(
        _C,
        "Segments of earlier lives that could not be read at the start; absent without a journal.",
    ),
    # Pools that scale: nothing of it where none does.
    "scale_frozen": Family(_G, "1 if the number of groups is frozen, else 0."),
    "desired_groups": Family(
        _G, "Groups that were to serve, by the last decision: told, or advised.", ("pool",)
    ),
    "urgent_work_rate": Family(
        _G,
        "Urgent work-seconds that came in per second, by the last decision: `first` tries and `repeats`.",
        ("pool", "tries"),
    ),
    "groups": Family(_G, "Groups that are there or were asked for.", ("pool", "standing")),
    "group_gpus": Family(_G, "GPUs that groups hold, ready or not.", ("pool",)),
    "group_gpu_seconds": Family(
        _C, "GPU time that groups held, as each decision found it since the one before.", ("pool",)
    ),
    "group_starts": Family(
        _C, "Starts that ended `ready`, and those that `failed`.", ("pool", "result")
    ),
    "group_drains": Family(_C, "Drains that ended with the group given back.", ("pool",)),
    "group_drain_seconds": Family(_C, "How long these took, all together.", ("pool",)),
    "scale_decisions": Family(
        _C, "Decisions by what asked for most: a signal, or the `floor`.", ("pool", "reason")
    ),
    "scale_brakes": Family(
        _C, "Decisions by what kept them from what was asked for.", ("pool", "brake")
    ),
    "scale_steps": Family(
        _C,
        "Groups that were to be asked for, woken, recalled, given up, drained.",
        ("pool", "step"),
    ),
    # Deferred requests: nothing of it where none are.
    "deferred_queued": Family(_G, "Deferred requests that wait in the store.", _WHO),
    "deferred_oldest_seconds": Family(
        _G, "For how long the oldest of these has waited; absent while none waits."
    ),
    "deferred_running": Family(_G, "Deferred requests that this process works on.", ("model",)),
    "deferred_limit": Family(
        _G, "How many of them live traffic leaves room for, as found by trying.", ("model",)
    ),
    "deferred_ended": Family(
        _C,
        "Deferred requests that this process worked on to their end.",
        ("result",),
    ),
    "deferred_kept": Family(
        _G, "Deferred requests that are over, until they are forgotten.", ("class", "result")
    ),
    "deferred_returned": Family(
        _C,
        "Those that went back unanswered: live traffic came, a limit was reached, the process ended.",
    ),
    "batches": Family(_G, "Batches that are kept, by where they are.", ("status",)),
    "batch_lines": Family(
        _C,
        "Lines of batches that this process made jobs (`put`), or wrote (`output`, `error`).",
        ("to",),
    ),
    "files": Family(_G, "Files that are kept: of batches, and of their answers."),
    "files_bytes": Family(_G, "Their size together."),
    "deferred_store_ok": Family(_G, "0 while the store of jobs is in trouble, else 1."),
    "decision_log_dropped_lines": Family(
        _C, "Decisions that could not be written; absent without a log."
    ),
    "audit_dropped_lines": Family(
        _C, "Audit lines that could not be written; absent without a file."
    ),
    "admin_denied": Family(_C, "Calls of the admin listener without a right key."),
    "admin_changes": Family(
        _C,
        "Changes asked of the admin listener (`policy`, `rollback`, `reload`, `key`, `freeze`, `thaw`, "
        "`drain`), by whether they were `made` or `refused`.",
        ("action", "result"),
    ),
}
"""By name without prefix and, for counters, without `_total`."""


def exposed(name: str) -> str:
    """Return a family's name as Prometheus sees it."""
    return PREFIX + name + ("_total" if FAMILIES[name].kind is Kind.COUNTER else "")

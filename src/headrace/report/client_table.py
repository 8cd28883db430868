"""How was the load of a live run made? The client's own figures as a table."""

from collections.abc import Mapping

from headrace.report import words
from headrace.report.live import Client
from headrace.report.stats import Quantiles
from headrace.report.tables import Column, Table


def client_table(client: Client, offered: int) -> Table:
    """Return how the load was made."""
    rows = [
        ("OFFERED", f"{words.count(offered)} of {words.count(client.trace_rows)} in the trace"),
        ("SENT", _sent(client, offered)),
        ("ANSWERED", counts(client.answers)),
        (
            "USAGE",
            _usage(client),
        ),
        ("LATENESS", lateness(client.lateness)),
        ("LOOP LAG", lag_text(client)),
    ]
    return Table(
        title=f"Replayed to {client.url}, {words.three(client.speed)} times as fast as the trace",
        columns=(Column("", right=False), Column("", right=False)),
        rows=tuple(rows),
        note=f"work priced by {client.profile}; lengths "
        + ("told to the server" if client.trusted else "as the server liked"),
    )


def _sent(client: Client, offered: int) -> str:
    text = words.count(client.sent)
    missing = offered - client.sent
    if missing:
        text += f"; {words.count(missing)} found no free connection"
    return f"{text}; STOPPED before the end" if client.stopped else text


def _usage(client: Client) -> str:
    given, made = (
        words.big(count) for count in (client.usage_input_tokens, client.usage_output_tokens)
    )
    return f"{given} tokens in, {made} out, as the server counts"


def counts(answers: Mapping[str, int]) -> str:
    """Return counts, the largest first."""
    ranked = sorted(answers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{words.count(number)} x {name}" for name, number in ranked)


def lateness(told: Quantiles | None) -> str:
    """Return how late requests were sent."""
    if told is None:
        return words.NONE
    return (
        f"p50 {words.duration(told.p50_ns)}, p99 {words.duration(told.p99_ns)},"
        f" max {words.duration(told.max_ns)} after the trace's time"
    )


def lag_text(client: Client) -> str:
    """Return the loop lag and whether the run counts."""
    text = f"p99 {words.duration(client.loop_lag_p99_ns)}"
    if client.valid:
        return text
    limit = words.duration(client.loop_lag_limit_ns)
    return f"{text}: INVALID, above {limit} the client measured itself"

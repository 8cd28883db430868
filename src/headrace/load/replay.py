"""A replay from its first request to its record: who was offered what, and how it went."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from headrace.load.caller import Answer, Failure
from headrace.load.judge import Judge, answer_name, concluded, offered
from headrace.load.lag import LIMIT_NS
from headrace.model.effect import Concluded
from headrace.model.ids import ModelName, RequestId, TenantId
from headrace.report.live import Client
from headrace.report.run import RunRecord
from headrace.report.stats import quantiles
from headrace.trace.row import TraceRow, trace_hash
from headrace.units import DurationNs, InstantNs


class Setting(Struct, frozen=True, kw_only=True):
    """What a replay's report says of how it was made."""

    label: str
    scenario: str
    seed: int
    url: str
    trusted: bool
    speed: float
    profile: str
    weights: dict[TenantId, int] = {}


class Replay:
    """Collects the answers to a trace as they come."""

    def __init__(self, rows: Sequence[TraceRow], judge: Judge, model: str) -> None:
        """Start with none."""
        self.rows, self._judge, self._model = rows, judge, model
        self.answers: dict[int, Answer] = {}
        self.ended: dict[int, Concluded] = {}

    def answered(self, index: int, answer: Answer) -> Concluded:
        """Note what came back and return the row that it makes."""
        row = self.rows[index]
        model = ModelName(row.model or self._model)
        end = concluded(RequestId(index + 1), row, answer, self._judge(row), model)
        self.answers[index], self.ended[index] = answer, end
        return end

    def run(self, setting: Setting) -> RunRecord:
        """Return the record of what was offered: all rows, or those up to where it was stopped."""
        indices = sorted(self.answers)
        rows = [self.rows[index] for index in indices]
        return RunRecord(
            label=setting.label,
            scenario=setting.scenario,
            seed=setting.seed,
            trace_hash=trace_hash(rows),
            span_ns=DurationNs(rows[-1].at - rows[0].at if rows else 0),
            end_ns=max((end.ended_at for end in self.ended.values()), default=InstantNs(0)),
            offered=[
                offered(RequestId(index + 1), row, self._judge(row))
                for index, row in zip(indices, rows, strict=True)
            ],
            rows=sorted(self.ended.values(), key=lambda end: (end.ended_at, end.request)),
            weights=setting.weights,
        )

    def client(self, setting: Setting, loop_lag_p99_ns: DurationNs) -> Client:
        """Return how the load was made."""
        told = self.answers
        sent = {
            index: answer for index, answer in told.items() if answer.failure is not Failure.LIMIT
        }
        names = Counter(answer_name(told[index]) for index in sorted(told))
        return Client(
            url=setting.url,
            trusted=setting.trusted,
            speed=setting.speed,
            profile=setting.profile,
            trace_rows=len(self.rows),
            sent=len(sent),
            answers=dict(sorted(names.items())),
            usage_input_tokens=sum(one.input_tokens or 0 for one in told.values()),
            usage_output_tokens=sum(one.output_tokens or 0 for one in told.values()),
            lateness=quantiles(
                max(0, answer.sent_at - self.rows[index].at) for index, answer in sent.items()
            ),
            loop_lag_p99_ns=loop_lag_p99_ns,
            loop_lag_limit_ns=LIMIT_NS,
            stopped=len(told) < len(self.rows)
            or any(answer.failure is Failure.STOPPED for answer in told.values()),
        )

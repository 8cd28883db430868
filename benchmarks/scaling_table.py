"""What each rule came to on each load, as text: mean of its runs, with all denominators."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from benchmarks.scaling_runs import Ran

LEGEND = """\
Mean of n runs. Work in GPU-seconds; offered: what groups could have served, without the share `hopeless` whose
prompts take longer than 2 s beside the streams of a group that carries C. U: what could not have been warm in time; spans: the part of the time in
which it grows; in, out: unserved work (refused, late, ended) inside and outside of the spans. outside: attainment over offered there;
all: the same with the hopeless; met: over the whole time. GPU-h beside those of the clairvoyant."""
COLUMNS: tuple[tuple[str, str, Callable[[Ran], float]], ...] = (
    ("offered", "8.0f", lambda one: one.offered_work_s),
    ("hopeless", "9.3f", lambda one: one.hopeless_work_s / (one.hopeless_work_s + one.offered_work_s)),
    ("U", "7.0f", lambda one: one.unavoidable_s),
    ("spans", "7.3f", lambda one: one.spans_s / one.span_s),
    ("in", "7.0f", lambda one: one.unserved_s),
    ("out", "7.0f", lambda one: one.outside_unserved_s),
    ("outside", "8.4f", lambda one: one.outside_attained),
    ("all", "8.4f", lambda one: one.outside_attained_all),
    ("met", "8.4f", lambda one: one.attained),
    ("GPU-h", "8.2f", lambda one: one.gpu_hours),
    ("known", "7.2f", lambda one: one.clairvoyant_hours),
    ("ratio", "7.2f", lambda one: one.cost),
)  # fmt: skip


def text(found: Sequence[Ran]) -> str:
    """Return the table with what its columns mean."""
    return "\n".join([LEGEND, *_lines(found)])


def _lines(found: Sequence[Ran]) -> Iterator[str]:
    heads = "".join(f"{name:>{int(form.split('.')[0])}}" for name, form, _ in COLUMNS)
    yield f"{'load':<18}{'start':>6} {'rule':<12}{'n':>2}{heads}"
    for key in dict.fromkeys((one.load, one.start_s, one.rule) for one in found):
        some = [one for one in found if (one.load, one.start_s, one.rule) == key]
        name, start_s, rule = key
        cells = "".join(f"{fmean(map(value, some)):{form}}" for _, form, value in COLUMNS)
        yield f"{name:<18}{start_s:>6g} {rule:<12}{len(some):>2}{cells}"

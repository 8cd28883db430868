"""Scenario files for tests of commands, small enough to run in a blink."""

from pathlib import Path

SMALL = """\
name: small
deployment:
  models: [{name: m}]
  pools: [{name: pool, model: m, profile: h100-8b-tp1, replicas: 2}]
  tenants: [{name: a}, {name: b}]
  slos:
    - name: interactive
      population: {slo_class: interactive}
      objectives:
        - {indicator: ttft, threshold_ms: 2000, target: 0.99}
mix:
  rows: 120
  sources:
    - tenant: a
      slo_class: interactive
      arrivals: {kind: poisson, rate: 40}
      lengths: {kind: lognormal, input_median: 600, output_median: 40, output_max: 200}
    - tenant: b
      slo_class: batch
      arrivals: {kind: poisson, rate: 10}
      lengths: {kind: fixed, input: 1500, output: 60}
faults:
  - {kind: crash, replica: 1, at_s: 1, back_after_s: 1}
  - {kind: leavers, share: 0.1, within_s: 1}
  - {kind: restart, at_s: 1.6, checkpoint_age_s: 0.3}
"""


def small(folder: Path, *changes: tuple[str, str], name: str = "small.yaml") -> str:
    """Write the scenario with some texts replaced; return its path."""
    text = SMALL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)

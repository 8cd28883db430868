"""Our series at vLLM's `/metrics`: where processes share a folder, and bounded in tenants."""

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from headrace.adapters.vllm_plugin.metrics import OTHER, TENANTS_MAX, VARIABLE, NoMetrics, metrics

SCENE = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from headrace.adapters.vllm_plugin.metrics import metrics
from headrace.adapters.vllm_plugin.guests import Guests
from tests.adapters.vllm_plugin.fakes import BEGIN, Request, guests, told
here, counts = guests(), metrics()
counts.mode("enforce")
counts.planned(70e-6)
counts.planned(1.0)
for nth in range({TENANTS_MAX} + 6):
    request = Request(str(nth), 10)
    guest = here.arrive(request, told(f"tenant {{nth}}", relegated=nth == 1), BEGIN)
    request.num_output_tokens = 3
    counts.preempted(guest)
    counts.ended(guest)
counts.ended(here.arrive(Request("unmarked", 5), None, BEGIN))
counts.mode("stock")
os._exit(0)  # killed, in effect
"""


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> CollectorRegistry:
    """Return what an API server reads once the scheduler's process is gone."""
    folder = tmp_path_factory.mktemp("shared")
    subprocess.run([sys.executable, "-c", SCENE], env={VARIABLE: str(folder)}, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


def value(series: CollectorRegistry, name: str, **labels: str) -> float | None:
    return series.get_sample_value(f"headrace_engine_{name}", labels)


def test_series_can_be_read_from_another_process(series: CollectorRegistry) -> None:
    assert value(series, "requests_total", tenant="tenant 0", marked="true") == 1
    assert value(series, "prompt_tokens_total", tenant="tenant 0") == 10
    assert value(series, "output_tokens_total", tenant="tenant 0") == 3
    assert value(series, "preemptions_total", tenant="tenant 0", relegated="false") == 1
    assert value(series, "preemptions_total", tenant="tenant 1", relegated="true") == 1


def test_tenants_beyond_the_bound_are_added_up(series: CollectorRegistry) -> None:
    tenants = {
        sample.labels["tenant"]
        for family in series.collect()
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert len(tenants) == TENANTS_MAX + 1
    assert value(series, "requests_total", tenant=OTHER, marked="true") == 6
    assert value(series, "requests_total", tenant=OTHER, marked="false") == 1
    assert value(series, "prompt_tokens_total", tenant=OTHER) == 65


def test_planning_time_is_a_histogram(series: CollectorRegistry) -> None:
    assert value(series, "schedule_seconds_count") == 2
    assert value(series, "schedule_seconds_bucket", le="0.0001") == 1
    assert value(series, "schedule_seconds_bucket", le="+Inf") == 2


def test_only_who_schedules_now_is_at_one(series: CollectorRegistry) -> None:
    modes = {
        sample.labels["mode"]: sample.value
        for family in series.collect()
        if family.name == "headrace_engine_scheduling"
        for sample in family.samples
    }
    assert modes == {"enforce": 0, "stock": 1}


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_shared_folder_nothing_is_counted(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert isinstance(metrics(), NoMetrics)


def test_files_are_left_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    counts = metrics()
    counts.mode("enforce")
    counts.planned(1.0)
    assert not list(tmp_path.iterdir())

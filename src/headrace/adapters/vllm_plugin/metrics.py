"""Series of ours at vLLM's own `/metrics`, where that is possible.

The scheduler runs in a process of its own, whose numbers vLLM's API server sees only where all of them share
`PROMETHEUS_MULTIPROC_DIR`: set to an empty folder before vLLM starts. Else there are none; the step log
has more.
"""

import os
from functools import cache
from typing import Protocol

from headrace.adapters.vllm_plugin.guests import Guest

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
TENANTS_MAX = 64
"""Tenants with series of their own, by when they first came; the others are added up as `other`."""
OTHER = "other"
_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 25.6e-3)


class Metrics(Protocol):
    """What is counted."""

    def planned(self, seconds: float) -> None:
        """Count a step that took so long to plan."""
        ...

    def ended(self, guest: Guest) -> None:
        """Count a request that is over."""
        ...

    def preempted(self, guest: Guest) -> None:
        """Count a request that lost its slot."""
        ...

    def mode(self, name: str) -> None:
        """Tell who schedules from now on: `enforce`, `passive` or `stock`."""
        ...


class NoMetrics:
    """Where nobody could read them."""

    def planned(self, seconds: float) -> None:
        """Count nothing."""

    def ended(self, guest: Guest) -> None:
        """Count nothing."""

    def preempted(self, guest: Guest) -> None:
        """Count nothing."""

    def mode(self, name: str) -> None:
        """Tell nothing."""


class PrometheusMetrics:
    """Files in the folder that vLLM's processes share."""

    def __init__(self) -> None:
        """Declare the series."""
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415  vLLM's, if at all

        self._tenants: set[str] = set()
        self._schedule = Histogram(
            "headrace_engine_schedule_seconds", "Time to plan a step.", buckets=_SECONDS
        )
        self._requests = Counter(
            "headrace_engine_requests", "Requests that are over.", ["tenant", "marked"]
        )
        self._prompt = Counter(
            "headrace_engine_prompt_tokens", "Prompt tokens of requests that are over.", ["tenant"]
        )
        self._output = Counter(
            "headrace_engine_output_tokens", "Output tokens of requests that are over.", ["tenant"]
        )
        self._preemptions = Counter(
            "headrace_engine_preemptions", "Requests that lost their slot.", ["tenant", "relegated"]
        )
        self._mode = Gauge(
            "headrace_engine_scheduling", "1: who schedules.", ["mode"], multiprocess_mode="liveall"
        )
        self._was: str | None = None

    def planned(self, seconds: float) -> None:
        """Count a step that took so long to plan."""
        self._schedule.observe(seconds)

    def ended(self, guest: Guest) -> None:
        """Count a request that is over."""
        tenant = self._tenant(guest)
        self._requests.labels(tenant, _word(guest.told is not None)).inc()
        self._prompt.labels(tenant).inc(guest.request.num_prompt_tokens)
        self._output.labels(tenant).inc(guest.request.num_output_tokens)

    def preempted(self, guest: Guest) -> None:
        """Count a request that lost its slot."""
        self._preemptions.labels(self._tenant(guest), _word(guest.relegated)).inc()

    def mode(self, name: str) -> None:
        """Tell who schedules from now on."""
        if self._was is not None:
            self._mode.labels(self._was).set(0)
        self._mode.labels(name).set(1)
        self._was = name

    def _tenant(self, guest: Guest) -> str:
        if guest.tenant not in self._tenants:
            if len(self._tenants) >= TENANTS_MAX:
                return OTHER
            self._tenants.add(guest.tenant)
        return guest.tenant


def _word(value: bool) -> str:
    return "true" if value else "false"


@cache
def metrics() -> Metrics:
    """Return what counts where vLLM's processes share a folder, else what counts nothing."""
    return PrometheusMetrics() if os.environ.get(VARIABLE) else NoMetrics()

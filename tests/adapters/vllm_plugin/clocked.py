"""A scheduler of vLLM with a clock of its own; only imported in vLLM's environment."""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class Clocked(Scheduler):  # type: ignore[misc]
    """Notes what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start on real time."""
        super().__init__(*args, **kwargs)
        self.clock = time.monotonic_ns
        self.planned_ns: list[int] = []
        self.given: list[Any] = [self.vllm_config.additional_config]

    def add_request(self, request: Any) -> None:
        """Note what came with a request."""
        self.given.append(request.sampling_params.extra_args)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Note when it is called."""
        self.planned_ns.append(self.clock())
        return super().schedule(throttle_prefills)

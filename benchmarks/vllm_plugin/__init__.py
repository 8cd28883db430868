"""Whom does vLLM serve under our scheduler, whom under its own, and what does ours cost?

Costs and exactness: schedulers of both kinds step the same requests in turns, in one process, on virtual time
(`steps`). Whom it serves: a real vLLM on this machine's CPU behind HTTP, with our class, and with our
class looking on while vLLM's own decides (`live`); counts of usage and of the step log, nobody's clock.

Absent without vLLM's environment: HEADRACE_VLLM, or build/vllm as `make build/vllm/.stamp` makes it.
"""

import os
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.vllm_plugin import live, steps
from tests.services import vllm

_BUILT = Path(__file__).parents[2] / "build" / "vllm"


def run(quick: bool) -> Result:
    """Measure: a minute for the part in one process alone, or some fifteen with the servers."""
    if vllm.environment() is None and (_BUILT / ".stamp").exists():
        os.environ[vllm.ENVIRONMENT] = str(_BUILT)
    home = vllm.environment()
    if home is None:
        print("vllm_plugin: absent, no environment of vLLM here")
        return Result(name="vllm_plugin", claims=[], detail={"absent": "no environment of vLLM"})
    claims, detail = steps.measured(quick=quick)
    if not quick:
        more, found = live.measured(home)
        claims, detail = claims + more, detail | found
    return Result(name="vllm_plugin", claims=claims, detail=detail)

"""A real hour of chat, on a real profile: jumps equal steps there too."""

from pathlib import Path

import pytest

from headrace.config.profiles import load_profile
from headrace.policy.batching import ChunkedPrefill
from headrace.trace.read import read_trace
from headrace.units import InstantNs
from tests.replica.scenes import drain, engine, job, run_to

pytestmark = pytest.mark.data


@pytest.mark.parametrize("speed", [1, 8])
def test_first_requests_of_the_azure_trace_take_the_same_course(data_dir: Path, speed: int) -> None:
    rows = read_trace("azure", data_dir / "traces/azure2023_conv.csv.gz")[:600]
    logs = []
    for jumps in (True, False):
        replica = engine(load_profile("h100-8b-tp1"), ChunkedPrefill(), jumps=jumps)
        log: list[object] = []
        for nth, row in enumerate(rows):
            at = row.at // speed
            log += run_to(replica, at)
            replica.submit(job(nth, row.input_tokens, row.output_tokens), InstantNs(at))
        log += drain(replica)
        replica.check()
        logs.append(log)
    assert len(logs[0]) == 2 * len(rows)
    assert logs[0] == logs[1]

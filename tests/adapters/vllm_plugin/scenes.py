"""What tests of schedulers inside vLLM share: steps of 5 ms, engines, and a run that must end clean."""

from tests.replica.scenes import FLAT_DECODE, FLAT_MIXED, small
from tests.services import vllm_steps
from tests.services.vllm_scene import ASYNC, SYNC, Asked, Engine, Run, Scene

FLAT = small(decode=FLAT_DECODE, mixed=FLAT_MIXED)
STEP_PS = 5_000_000_000
STEP_NS = 5_000_000


def engine(scheduler: str = SYNC, **more: object) -> Engine:
    """Return an engine that plans a step ahead if its scheduler is made for it."""
    return Engine(scheduler=scheduler, async_scheduling=scheduler != SYNC, **more)  # type: ignore[arg-type]


BOTH = (engine(SYNC), engine(ASYNC))


def play(*requests: Asked, engine: Engine, **more: object) -> Run:
    """Run requests and see that the books are empty at the end."""
    scene = Scene(engine=engine, requests=requests, **({"profile": FLAT} | more))  # type: ignore[arg-type]
    run = vllm_steps.shared().play(scene)
    assert run.is_clean, run.error or run.left
    return run


def tokens_at(run: Run, name: str) -> list[float]:
    """Return when a request's tokens were out, in steps of 5 ms from the start."""
    return [at / STEP_PS for at in run.fates[name].token_ps]


def starts(run: Run) -> list[str]:
    """Return the requests in the order in which they were first scheduled."""
    return [name for step in run.steps for name in step.new]

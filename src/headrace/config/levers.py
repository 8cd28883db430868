"""Do the settings that operators turn while requests run name what there is, and what heeds them?"""

from collections.abc import Iterator

from headrace.config.problem import Problem, unknown, warning
from headrace.config.schema import Settings
from headrace.policy.batching import ChunkedPrefill


def levers(settings: Settings) -> Iterator[Problem]:
    """Yield names that are not configured, and pools whose engines have steps of their own."""
    plane, at = settings.deployment, "$.deployment.output_budget"
    budget = plane.output_budget
    classes, models = ({one.name: None for one in some} for some in (plane.classes, plane.models))
    for name in budget.classes:
        yield from unknown(f"{at}.classes.{name}", "class", name, classes)
    for name in budget.models:
        yield from unknown(f"{at}.models.{name}", "model", name, models)
    yield from _steps(settings)


def _steps(settings: Settings) -> Iterator[Problem]:
    plane, at = settings.deployment, "$.deployment.window.step_tokens"
    pools = {one.name: None for one in plane.pools}
    real = settings.real
    batching = settings.emulator.batching
    heeded = isinstance(batching, ChunkedPrefill) and batching.token_budget is None
    for name in plane.window.step_tokens:
        yield from unknown(f"{at}.{name}", "pool", name, pools)
        if name in real:
            message = f"pool `{name}` has real engines, whose steps are as they were started"
            yield Problem(path=f"{at}.{name}", message=message)
        elif not heeded:
            message = (
                "the engines fill their steps as `emulator.batching` says, whatever stands here"
            )
            yield warning(f"{at}.{name}", message)

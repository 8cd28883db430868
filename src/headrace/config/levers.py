"""Do the settings that operators turn while requests run name what there is?"""

from collections.abc import Iterator

from headrace.config.problem import Problem, unknown
from headrace.config.schema import Settings


def levers(settings: Settings) -> Iterator[Problem]:
    """Yield classes and models of budgets that are not configured."""
    plane, at = settings.deployment, "$.deployment.output_budget"
    budget = plane.output_budget
    classes, models = ({one.name: None for one in some} for some in (plane.classes, plane.models))
    for name in budget.classes:
        yield from unknown(f"{at}.classes.{name}", "class", name, classes)
    for name in budget.models:
        yield from unknown(f"{at}.models.{name}", "model", name, models)

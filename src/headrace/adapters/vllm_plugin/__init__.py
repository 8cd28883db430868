"""Our scheduler inside vLLM: `--scheduler-cls headrace.adapters.vllm_plugin.SLOScheduler`.

Nothing of vLLM is imported before the class is asked for, so that settings and records can be read
where there is no vLLM.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.adapters.vllm_plugin.scheduler import SLOScheduler

__all__ = ["SLOScheduler"]


def __getattr__(name: str) -> object:
    """Import the class on first use."""
    if name != "SLOScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headrace.adapters.vllm_plugin.scheduler import SLOScheduler  # noqa: PLC0415  see above

    return SLOScheduler

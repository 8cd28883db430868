"""Our scheduler in releases of vLLM that there are not; only imported in vLLM's environment."""

from typing import Any
from unittest.mock import patch

from headrace.adapters.vllm_plugin import contract
from headrace.adapters.vllm_plugin.scheduler import SLOScheduler


class Unknown(SLOScheduler):
    """In a release that it was not tested with, though it has all that is used."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start as there."""
        with patch.object(contract, "TESTED", ("0.1.0",)):
            super().__init__(*args, **kwargs)


class Lacking(SLOScheduler):
    """In a release whose KV cache manager lacks a method."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start as there."""
        cache = (*contract.CACHE, "gone_since")
        with patch.object(contract, "TESTED", ("0.1.0",)), patch.object(contract, "CACHE", cache):
            super().__init__(*args, **kwargs)


class Failing(SLOScheduler):
    """Fails as it plans its 100th step."""

    planned = 0

    def _prepare(self) -> None:
        self.planned += 1
        if self.planned == 100:
            raise RuntimeError("planted")
        super()._prepare()

"""Which tokenizers does a configuration name? Engines' own, or files of ours."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.adapters.engines.remote import RemoteEngine
from headrace.adapters.tokens.engine import EngineTokenizer
from headrace.adapters.tokens.local import LocalTokenizer
from headrace.config.errors import ConfigError, Fault, Origin
from headrace.config.schema import EngineTokenizerSpec, FileTokenizerSpec, Settings
from headrace.gateway.counting import Counting
from headrace.model.ids import ModelName
from headrace.ports.clock import Clock
from headrace.ports.engine import EngineClient
from headrace.ports.tokens import TokenCounter

Engines = Callable[[], Iterable[EngineClient]]
"""What tells the engines that are there just then: some come and go while we run."""


def counting(settings: Settings, engines: Engines, clock: Clock) -> Counting | None:
    """Return what counts prompts, or None; raises ConfigError for files that cannot be read."""
    spec = settings.token_counts
    if spec is None:
        return None
    counters: dict[str, tuple[ModelName, TokenCounter]] = {}
    for nth, one in enumerate(spec.models):
        match one:
            case EngineTokenizerSpec():
                counter: TokenCounter = _of_engines(settings, one, engines, clock)
            case FileTokenizerSpec():
                counter = _of_file(one, spec.at_once, f"$.token_counts.models[{nth}]")
        model = next(found for found in settings.deployment.models if found.name == one.model)
        for name in model.names:
            counters[name] = ModelName(model.name), counter
    return Counting(spec, counters)


def _of_engines(
    settings: Settings, spec: EngineTokenizerSpec, engines: Engines, clock: Clock
) -> EngineTokenizer:
    pools = {pool.name for pool in settings.deployment.pools if pool.model == spec.model}

    def there() -> list[RemoteEngine]:
        return [one for one in engines() if one.pool in pools and isinstance(one, RemoteEngine)]

    return EngineTokenizer(there, clock)


def _of_file(spec: FileTokenizerSpec, threads: int, path: str) -> LocalTokenizer:
    try:
        return LocalTokenizer(Path(spec.file), ThreadPoolExecutor(threads, "tokenizer"))
    except ImportError:
        message = "needs the library `tokenizers`: pip install 'headrace[tokenizer]'"
        raise ConfigError([Fault(Origin("configuration"), message, path)]) from None
    except OSError as error:
        message = (error.strerror or str(error)).lower()
        raise ConfigError([Fault(Origin(spec.file), message, f"{path}.file")]) from error
    except ValueError as error:
        raise ConfigError([Fault(Origin(spec.file), str(error), f"{path}.file")]) from error

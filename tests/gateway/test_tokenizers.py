"""Which tokenizers a configuration names, and what keeps the gateway from starting with them."""

import asyncio
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.config.errors import ConfigError
from headrace.config.schema import FileTokenizerSpec, Settings, TokenCountsSpec
from headrace.gateway.clock import LoopClock
from headrace.gateway.tokenizers import counting
from tests.gateway.scenes import MODEL, deployment

pytestmark = pytest.mark.asyncio


def settings(file: Path) -> Settings:
    spec = FileTokenizerSpec(model=MODEL, file=str(file))
    return Settings(deployment=deployment(), token_counts=TokenCountsSpec(models=(spec,)))


def clock() -> LoopClock:
    return LoopClock(asyncio.get_running_loop())


async def test_without_tokenizers_nothing_counts(tmp_path: Path) -> None:
    told = replace(settings(tmp_path), token_counts=None)
    assert counting(told, tuple, clock()) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file or directory"), ("{}", "no tokenizer: "), ("\xff", "no tokenizer: ")],
    ids=["none", "empty", "no JSON"],
)
async def test_a_file_that_is_no_tokenizer_stops_the_start(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        counting(settings(file), tuple, clock())
    (fault,) = caught.value.faults
    assert fault.message.startswith(message)
    assert str(fault).endswith("at `$.token_counts.models[0].file`")


async def test_a_file_that_is_no_text_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError):
        counting(settings(file), tuple, clock())


async def test_without_the_extra_one_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[tokenizer\]'"):
        counting(settings(tmp_path), tuple, clock())

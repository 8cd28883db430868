"""The README's `curl` lines, run as they stand."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_upstream import fronted
from tests.gateway.scenes import KEYS, MODEL
from tests.support import require_service

pytestmark = [pytest.mark.asyncio, pytest.mark.service]
README = Path(__file__).parents[2] / "README.md"
LINES = re.findall(r"^curl (?:.*\\\n)*.*$", README.read_text(), re.MULTILINE)


async def test_the_readmes_requests_are_answered() -> None:
    if shutil.which("curl") is None:
        require_service("curl", "curl is not installed")
    assert len(LINES) == 2
    async with fronted() as front:
        answers = []
        for line in LINES:
            command = line.replace("http://127.0.0.1:8000", front.base).replace("my-model", MODEL)
            shell = await asyncio.create_subprocess_shell(
                f"KEY={KEYS['free']}; {command}",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            answers.append((await shell.communicate())[0].decode())
            assert shell.returncode == 0
        whole, stream = answers
        assert '"completion_tokens":8' in whole
        assert "event: message_start" in stream
        assert "event: message_stop" in stream

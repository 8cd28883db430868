"""What holds for every command."""

import os
import subprocess
import sys

import pytest

from headrace.cli import COMMANDS

RUN = "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("flags", [["-O"], ["-OO"], []], ids=["-O", "-OO", "PYTHONOPTIMIZE"])
def test_no_command_runs_without_assertions(flags: list[str]) -> None:
    env = os.environ | ({} if flags else {"PYTHONOPTIMIZE": "1"})
    words = COMMANDS[-1][0].split()
    done = subprocess.run(
        [sys.executable, *flags, "-c", RUN, *words],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "headrace: run without -O (PYTHONOPTIMIZE): assertions guard the control plane\n"
    )

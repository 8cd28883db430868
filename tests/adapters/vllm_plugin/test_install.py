"""The plug-in goes into vLLM's environment with `--no-deps`: it needs msgspec there, and nothing else of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.adapters import vllm_plugin
from tests.services.vllm import needed

ROOT = Path(__file__).parents[3]
PARTS = ("guests", "queue", "turning", "settings", "contract", "recording", "metrics", "steplog")
# Lets in the standard library, msgspec and ourselves, and says who asked for anything else.
ALONE = """
import sys
class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("headrace", "msgspec"):
            raise ImportError(f"{name} is not in vLLM's environment for us")
sys.meta_path.insert(0, Guard())
"""


def test_it_imports_with_msgspec_alone() -> None:
    code = ALONE + "".join(f"import headrace.adapters.vllm_plugin.{part}\n" for part in PARTS)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_class_is_named_by_the_package_and_nothing_else_is() -> None:
    assert vllm_plugin.__all__ == ["SLOScheduler"]
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        getattr(vllm_plugin, "Scheduler")  # noqa: B009  mypy knows that too


@pytest.mark.vllm
def test_a_wheel_without_dependencies_has_the_class(tmp_path: Path) -> None:
    python = needed() / "bin" / "python"
    make: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*make, "-w", tmp_path, ROOT], check=True, timeout=120)
    (wheel,) = tmp_path.glob("headrace-*.whl")
    site = tmp_path / "site"
    put: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        site,
    ]
    subprocess.run([*put, wheel], check=True, timeout=120)
    done = subprocess.run(
        [
            python,
            "-c",
            "from headrace.adapters.vllm_plugin import SLOScheduler as it; print(it.__mro__[1])",
        ],
        env={"PYTHONPATH": str(site), "PATH": "", "VLLM_NO_USAGE_STATS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "async_scheduler.AsyncScheduler" in done.stdout, done.stderr

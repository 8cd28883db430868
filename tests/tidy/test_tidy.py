"""House style that no linter knows."""

import ast
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.joinpath("src").rglob("*.py"))
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500

HOT: dict[str, str] = {}
"""Files free of the length limits, each with its reason, by path from the root.

For code on the path of every request or step, where a call costs more than it tells. The list
only shrinks: an entry that needs no exemption any more fails.
"""

FRAGMENT = re.compile(r"[a-z0-9][a-z0-9-]*\.(added|changed|fixed|removed)\.md")
DECISION = re.compile(r"\d{4}-[a-z0-9-]+\.md")
# Written so that none of them matches itself.
REGISTRY = re.compile(
    r"(?:pypi|pythonhosted|npmjs|yarnpkg|npmmirror|anaconda|crates)\.(?:org|com|io)\b"
    r"|:/{2}(?:registry|deb)\."
    r"|:/{2}\S+/simple\b"
    r"|[\"']resolved[\"']: *[\"']http"
)
MACHINE_PATH = re.compile(r"(?<![\w.~*}-])/(?:work|root|farm)/")
UNTRACKED = {"__pycache__", "build", "dist", "node_modules", "reports", "htmlcov"}


def relative(path: Path) -> str:
    """Name a file from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def walk(folder: Path) -> Iterator[Path]:
    """Yield the files that belong to the repository where git cannot say."""
    for name, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in UNTRACKED and (f == ".ci" or f[0] != ".")]
        yield from (Path(name, file) for file in files)


def tracked() -> list[Path]:
    """Return the files git tracks; outside a repository, whatever is not a build's leaving."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    paths = [ROOT / name for name in listed.split("\0") if name] or list(walk(ROOT))
    return sorted(path for path in paths if path.is_file())


def longest_function(tree: ast.Module) -> tuple[int, str]:
    """Return the length and name of the longest function, nested ones and methods included."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name) for node in functions
    ]
    return max(lengths, default=(0, ""))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_is_tidy(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "say what the module is for"
    if relative(path) not in HOT:
        assert text.count("\n") <= FILE_LINES_MAX, "split the file"
        lines, name = longest_function(tree)
        assert lines <= FUNCTION_LINES_MAX, f"{name}: {lines} lines"


def test_hot_list_only_shrinks() -> None:
    for name, reason in HOT.items():
        assert reason, f"{name}: say why"
        text = ROOT.joinpath(name).read_text(encoding="utf-8")
        long = text.count("\n") > FILE_LINES_MAX
        long = long or longest_function(ast.parse(text))[0] > FUNCTION_LINES_MAX
        assert long, f"{name} keeps the limits: take it off the list"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_names_say_what_they_mean(path: Path) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    silent = [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent, f"no docstring: {', '.join(silent)}"


def test_locks_pin_hashes_and_no_address() -> None:
    assert not ROOT.joinpath("uv.lock").exists(), "it records addresses; use make lock"
    assert not [relative(path) for path in tracked() if path.name == "uv.lock"]
    for path in sorted(ROOT.joinpath("requirements").iterdir()):
        text = path.read_text(encoding="utf-8")
        assert ":/" + "/" not in text, f"{path.name} names an address"
        if path.suffix == ".lock":
            assert text.count("--hash=") >= text.count("==") > 0, f"{path.name} lacks hashes"


def test_runtime_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = ROOT.joinpath("requirements", "run.in").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert sorted(wanted) == sorted(project["dependencies"])


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = [
        f"{relative(path)}:{number}: {line.strip()[:80]}"
        for path in tracked()
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        if REGISTRY.search(line) or MACHINE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


def test_changelog_fragments_have_a_known_type() -> None:
    for path in sorted(ROOT.joinpath("changelog.d").iterdir()):
        if path.name != "README.md":
            assert FRAGMENT.fullmatch(path.name), f"{path.name}: see changelog.d/README.md"
            assert path.read_text(encoding="utf-8").strip(), f"{path.name} is empty"


def test_decision_notes_have_a_number_a_title_and_a_status() -> None:
    notes = sorted(ROOT.joinpath("docs", "decisions").glob("*.md"))
    notes = [path for path in notes if path.name != "README.md"]
    for path in notes:
        assert DECISION.fullmatch(path.name), f"{path.name}: see docs/decisions/README.md"
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), f"{path.name} has no title"
        assert any(line.startswith("Status: ") for line in lines), f"{path.name} has no status"
    numbers = [path.name[:4] for path in notes]
    assert len(set(numbers)) == len(numbers), f"a number is used twice: {numbers}"

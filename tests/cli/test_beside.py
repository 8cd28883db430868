"""`--observe`, `--shadow` and what goes with them: what is refused, and what comes of it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli import main
from headrace.cli.beside import beside, tell
from headrace.cli.serve import demo_settings
from headrace.config.schema import Settings
from headrace.gateway.shadow import Beside, Shadow
from headrace.policy.admission.gates import GateMode
from headrace.policy.catalog import passing

Output = pytest.CaptureFixture[str]
NEW = """
deployment:
  models: [{name: headrace-demo}]
  pools: [{name: demo, model: headrace-demo, profile: h100-8b-tp1, replicas: 2}]
  tenants: [{name: demo}]
  admission: {margin_ms: 200}
"""


def settings() -> Settings:
    return demo_settings("sk", {}).settings


def written(folder: Path, text: str) -> Path:
    path = folder / "new.yaml"
    path.write_text(text)
    return path


def test_observing_serves_by_what_passes_and_watches_with_what_was_given() -> None:
    given = settings()
    served, second = beside(given, observe=True, shadow=None, log=None, shown=False)
    assert second is not None
    assert served.deployment == passing(given.deployment)
    assert served.deployment.admission.mode is GateMode.OBSERVE
    assert second.config == given.deployment
    assert second.observed
    assert replace(served, deployment=given.deployment) == given


def test_a_shadow_changes_nothing_of_what_is_served(tmp_path: Path) -> None:
    given = settings()
    path, log = written(tmp_path, NEW), tmp_path / "shadow.jsonl"
    served, second = beside(given, observe=False, shadow=path, log=log, shown=True)
    assert served is given
    assert second is not None
    assert second.config.admission.margin_ms == 200
    assert (second.observed, second.shown, second.log) == (False, True, log)
    assert beside(given, observe=False, shadow=None, log=None, shown=False) == (given, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (NEW.replace("margin_ms", "margn_ms"), "new.yaml:6: unknown field `margn_ms`"),
        (NEW.replace("name: demo, model", "name: mine, model"), "no pool `demo` of model"),
        (NEW.replace("model: headrace-demo", "model: other"), "unknown model `other`"),
    ],
)
def test_a_shadow_that_is_wrong_stops_the_start(
    tmp_path: Path, capsys: Output, text: str, told: str
) -> None:
    assert main(["serve", "--port=0", "--shadow", str(written(tmp_path, text))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("headrace: ")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--observe", "--shadow", "new.yaml"], "flag --shadow: give either"),
        (["--shadow-log", "x.jsonl"], "flag --shadow-log: give --shadow or --observe too"),
        (["--shadow-header"], "flag --shadow-header: give --shadow or --observe too"),
        (["--shadow", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    capsys: Output, flags: list[str], told: str
) -> None:
    assert main(["serve", "--port=0", *flags]) == 2
    assert told in capsys.readouterr().err


def test_warnings_about_the_shadows_decisions_are_shown(tmp_path: Path, capsys: Output) -> None:
    text = NEW + "  window: {prefill_ms: 1}\nserver: {host: 0.0.0.0}\n"
    beside(settings(), observe=False, shadow=written(tmp_path, text), log=None, shown=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: warning: ")
    assert "1 ms is less than one full step" in line


def test_the_report_says_whose_decisions_it_is_about(capsys: Output) -> None:
    config = settings().deployment
    shadow = Shadow(config)
    tell(Beside(config=config, name="new.yaml"), shadow)
    out = capsys.readouterr().out
    assert out.startswith("headrace: what new.yaml would decide:\n  0 requests: 0 decided alike")
    shadow.broken = AssertionError()
    tell(Beside(config=config, name="the configuration", observed=True), shadow)
    out = capsys.readouterr().out
    assert out.startswith("headrace: what the configuration would have decided")
    assert "stopped by a bug of its own" in out

"""The commands: one file each, named in one table and imported only when called.

To add a command, write `headrace/cli/NAME.py` with a function that takes what the command line
gives and returns its exit code (or None for 0), and add a row to `COMMANDS`.
"""

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from headrace import __version__
from headrace.cli.errors import fail, reported

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("capacity", "headrace.cli.capacity:capacity", "Find what a replica carries, or size a fleet."),
    ("chaos", "headrace.cli.chaos:chaos", "Have a fleet go wrong, and check what is expected."),
    ("config check", "headrace.cli.config:check", "Check a configuration file."),
    ("config explain", "headrace.cli.config:explain", "Show each setting, its source and why."),
    ("config schema", "headrace.cli.config:schema", "Print the JSON schema of the configuration."),
    ("compare", "headrace.cli.compare:compare", "Compare two reports on one trace or mix."),
    ("decisions verify", "headrace.cli.verify:decisions", "Recompute every decision of a log."),
    ("demo", "headrace.cli.demo:demo", "Show the control plane at work, live and simulated."),
    ("engine", "headrace.cli.engine:engine", "Serve one emulated replica as vLLM would."),
    ("explain", "headrace.cli.explain:explain", "Tell what was decided about a request, and why."),
    ("key new", "headrace.cli.keys:new", "Make an API key and the line that grants it."),
    ("parity", "headrace.cli.parity:parity", "Run a scenario simulated and live, and compare."),
    ("policy history", "headrace.cli.policy:history", "Show who changed the policy, and how."),
    ("policy rollback", "headrace.cli.policy:rollback", "Bring back an earlier policy."),
    ("policy set", "headrace.cli.policy:set_", "Change the policy of a running gateway."),
    ("policy show", "headrace.cli.policy:show", "Show the policy of a running gateway."),
    ("replay", "headrace.cli.replay:replay", "Offer a trace to a live server, open-loop."),
    ("scale explain", "headrace.cli.scale:explain", "Tell why a pool has so many groups."),
    ("serve", "headrace.cli.serve:serve", "Serve an OpenAI-compatible API."),
    ("simulate", "headrace.cli.simulate:simulate", "Run a scenario in virtual time."),
    ("steps", "headrace.cli.steps:steps", "Tell what the steps of an engine came to."),
    ("swarm", "headrace.cli.swarm:swarm", "Run random worlds with every invariant checked."),
    ("top", "headrace.cli.top:top", "Show a running gateway at a glance."),
    ("verify", "headrace.cli.verify:verify", "Replay a journal and compare every effect."),
)
"""(words of the command, where its function is, one line of help)."""

GROUPS = {
    "config": "Check, explain and describe configuration files.",
    "decisions": "Check decision logs.",
    "key": "Make API keys.",
    "policy": "Show and change the policy of a running gateway, and undo it.",
    "scale": "Tell about pools that scale.",
}
"""Help of the first word of commands of two."""


def app() -> App:
    """Return the command line, nothing of which is imported yet."""
    top = App(
        name="headrace",
        help="An SLO control plane for LLM serving.",
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        exit_on_error=False,
        print_error=False,
    )
    groups = {word: App(name=word, help=text) for word, text in GROUPS.items()}
    for group in groups.values():
        top.command(group)
    for words, target, text in COMMANDS:
        first, _, second = words.partition(" ")
        parent = groups[first] if second else top
        parent.command(target, name=second or first, help=text)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code.

    0: done. 1: a check failed. 2: the command line, a file or a setting is wrong. 3: a check could
    tell nothing. 130: interrupted.
    """
    if sys.flags.optimize:
        return fail("run without -O (PYTHONOPTIMIZE): assertions guard the control plane")
    tokens = list(sys.argv[1:] if argv is None else argv)
    with reported() as outcome:
        try:
            result = app()(tokens)
        except CycloptsError as error:
            return fail(str(error))
        outcome.code = result if isinstance(result, int) else 0
    return outcome.code

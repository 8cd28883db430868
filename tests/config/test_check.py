"""What no type can say is said by path: references, reach, proportion."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.config.check import problems
from headrace.config.errors import ConfigError
from headrace.config.load import load, parse
from headrace.config.problem import Severity
from headrace.config.resolve import resolved
from headrace.config.schema import Settings
from headrace.model.deployment import END
from tests.config.configs import BASE

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment.yaml"
HASH = "sha256:" + "0" * 64

NO_PLACES = [
    "http://h:65536",
    "http://h:0",
    "http://h:x",
    "http://:1",
    "http://[::1",
    "http://a..b",
]

# (BASE's text, what replaces it, lines of all errors)
WRONG = {
    "bursts that are over before a group is ready, and nothing bridges them": (
        "profile: h100-8b-tp1",
        "profile: h100-8b-tp1\n      scaling: {burst_horizon_s: 10}",
        [
            (
                "d:8: bursts of 10 s are over before a group is ready (67 s, p90): keep `standby` groups, "
                "set a `floor`, or name in `covers` what bridges them "
                "at `$.deployment.pools[0].scaling.burst_horizon_s`"
            )
        ],
    ),
    "covers of bursts that are none": (
        "profile: h100-8b-tp1",
        (
            "profile: h100-8b-tp1\n      scaling:\n        min: 0\n        burst_horizon_s: 10\n"
            "        covers: [warm, fallback, defer]\n  admission: {mode: audit}\n"
            "  classes: [{name: c}]"
        ),
        [
            "d:11: `min` is 0: nothing is warm at `$.deployment.pools[0].scaling.covers[0]`",
            (
                "d:11: no class falls back to another model (`classes[].degrade.model`) "
                "at `$.deployment.pools[0].scaling.covers[1]`"
            ),
            (
                "d:11: no class may be put aside (`classes[].defer`) "
                "at `$.deployment.pools[0].scaling.covers[2]`"
            ),
        ],
    ),
    "a deadline gate that covers nothing": (
        "profile: h100-8b-tp1",
        ("profile: h100-8b-tp1\n      scaling: {covers: [admission]}\n  admission: {mode: audit}"),
        [
            (
                "d:8: the deadline gate only records: nothing is refused in time "
                "at `$.deployment.pools[0].scaling.covers[0]`"
            )
        ],
    ),
    "engines at addresses, which nobody can start": (
        "profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "profile: h100-8b-tp1\n      scaling: {burst_horizon_s: 900}\n"
            "  tenants:\n    - name: t\nupstreams: [{url: http://e, pool: p}]"
        ),
        [
            (
                "d:8: nobody can start or stop engines that are told of by their addresses "
                "(`upstreams`): set `mode: advise`, or say in `groups` how they are started "
                "at `$.deployment.pools[0].scaling.mode`"
            )
        ],
    ),
    "sleepers among processes, and groups of pools that have none": (
        "profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "profile: h100-8b-tp1\n      scaling: {standby: 1}\n  tenants:\n    - name: t\n"
            "groups:\n  - {pool: p, command: [run, '{port}']}\n  - {pool: p, command: [run, '--at=:{port}']}\n"
            "  - {pool: q, command: [run], env: {PORT: '{port}'}}"
        ),
        [
            "d:8: processes cannot be put to sleep at `$.deployment.pools[0].scaling.standby`",
            "d:13: how `p` is started is told twice at `$.groups[1].pool`",
            "d:14: unknown pool `q` at `$.groups[2].pool`",
        ],
    ),
    "processes that nobody could find": (
        "profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "profile: h100-8b-tp1\n  tenants:\n    - name: t\n"
            "groups: [{pool: p, command: [run, --port=8000, '{rank}']}]"
        ),
        [
            (
                "d:10: `{port}` is in none of its arguments: it would listen where nobody looks "
                "at `$.groups[0].command`"
            )
        ],
    ),
    "an engine called as a group of a pool that scales may be after a restart": (
        "profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "profile: h100-8b-tp1\n      scaling: {max: 3}\n    - {name: q, model: m, profile: h100-8b-tp1}\n"
            "  tenants:\n    - name: t\n"
            "upstreams:\n- {url: 'http://h', pool: q, name: p-2}\n- {url: 'http://i', pool: q, name: p-3}"
        ),
        [
            (
                "d:13: a replica without a name of its own is called `p-2` already "
                "at `$.upstreams[0].name`"
            )
        ],
    ),
    "processes of a pool that no file can be called by": (
        "- name: p\n      model: m\n      profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "- name: a/p\n      model: m\n      profile: h100-8b-tp1\n  tenants:\n    - name: t\n"
            "groups: [{pool: a/p, command: [run, '{port}']}]"
        ),
        ["d:10: files are called by it: no `/` in the pool's name at `$.groups[0].pool`"],
    ),
    "GPUs for fewer groups than are to be there": (
        "profile: h100-8b-tp1",
        "profile: h100-8b-tp1\n      scaling: {min: 2, max_gpus: 7, shape: {tp: 4}}",
        [
            (
                "d:8: 7 GPUs are enough for 1 of the 2 groups of 4 that are to be there "
                "at `$.deployment.pools[0].scaling.max_gpus`"
            )
        ],
    ),
    "ladders to models that are none, or that serve somebody else": (
        "- name: t",
        (
            "- name: t\n      degrade: 3\n  classes:\n"
            "    - {name: c, degrade: {level: 3, model: x}}\n"
            "    - {name: d, degrade: {level: 3, model: n}}"
        ),
        [
            "d:12: unknown model `x` at `$.deployment.classes[0].degrade.model`",
            "d:13: unknown model `n` at `$.deployment.classes[1].degrade.model`",
        ],
    ),
    "a ladder to a model that does not serve its class": (
        "- name: m",
        "- name: m\n    - name: n\n  classes:\n    - {name: c, degrade: {level: 3, model: n}}",
        [
            "d:4: model `n` has no pool at `$.deployment.models[1]`",
            "d:6: no pool of `n` serves `c` at `$.deployment.classes[0].degrade.model`",
        ],
    ),
    "a third level without a model": (
        "- name: t",
        "- name: t\n  classes:\n    - {name: c, degrade: {level: 3}}",
        [
            "d:11: level 3 needs `model`, the smaller one that answers at `$.deployment.classes[0].degrade`",
        ],
    ),
    "a smaller model that is never reached": (
        "- name: t",
        "- name: t\n  classes:\n    - {name: c, degrade: {level: 2, model: m}}",
        [
            (
                "d:11: `model` is for level 3, and the ladder ends at level 2 "
                "at `$.deployment.classes[0].degrade`"
            ),
        ],
    ),
    "tokenizers of nobody, of one model twice, and of engines that have none": (
        "- name: t",
        (
            "- name: t\ntoken_counts:\n  models:\n    - {kind: file, model: n, file: f}\n"
            "    - {kind: engine, model: m}\n    - {kind: file, model: m, file: f}"
        ),
        [
            "d:12: unknown model `n` at `$.token_counts.models[0].model`",
            (
                "d:13: no upstream serves `m`, and emulated replicas count nothing "
                "at `$.token_counts.models[1].kind`"
            ),
            (
                "d:14: tokenizer of `m` is already at `$.token_counts.models[1].model` "
                "at `$.token_counts.models[2].model`"
            ),
        ],
    ),
    "output budgets of nobody": (
        "- name: t",
        "- name: t\n  output_budget: {classes: {interactve: 10}, models: {m.1: null}}",
        [
            (
                "d:10: unknown class `interactve`: did you mean `interactive`? "
                "at `$.deployment.output_budget.classes.interactve`"
            ),
            "d:10: unknown model `m.1` at `$.deployment.output_budget.models.m.1`",
        ],
    ),
    "steps of no pool, and of engines that have their own": (
        "- name: t",
        (
            "- name: t\n  window: {step_tokens: {p: 256, q: 256}}\n"
            "upstreams: [{url: http://127.0.0.1:1, pool: p}]"
        ),
        [
            (
                "d:10: pool `p` has real engines, whose steps are as they were started "
                "at `$.deployment.window.step_tokens.p`"
            ),
            "d:10: unknown pool `q` at `$.deployment.window.step_tokens.q`",
        ],
    ),
    "two models of one name": (
        "- name: m",
        "- name: m\n    - name: n\n      aliases: [m]",
        [
            "d:4: model `n` has no pool at `$.deployment.models[1]`",
            (
                "d:5: model, alias or adapter `m` is already at `$.deployment.models[0].name` "
                "at `$.deployment.models[1].aliases[0]`"
            ),
        ],
    ),
    "two tenants of one name": (
        "- name: t",
        "- name: t\n    - name: t",
        [
            (
                "d:10: tenant `t` is already at `$.deployment.tenants[0].name` "
                "at `$.deployment.tenants[1].name`"
            )
        ],
    ),
    "two lanes and two organisations of one name": (
        "- name: t",
        "- name: t\n  lanes: [{name: l}, {name: l}]\n  organisations: [{name: o}, {name: o}]",
        [
            "d:10: lane `l` is already at `$.deployment.lanes[0].name` at `$.deployment.lanes[1].name`",
            (
                "d:11: organisation `o` is already at `$.deployment.organisations[0].name` "
                "at `$.deployment.organisations[1].name`"
            ),
        ],
    ),
    "a class in two lanes": (
        "- name: t",
        (
            "- name: t\n  lanes: [{name: l}, {name: k}]\n  classes:\n    - {name: c, lane: l}\n"
            "    - {name: c, lane: k}"
        ),
        [
            "d:13: class `c` is already at `$.deployment.classes[0].name` at `$.deployment.classes[1].name`"
        ],
    ),
    "a lane and an organisation that are none": (
        "- name: t",
        (
            "- name: t\n      organisation: acmee\n  organisations: [{name: acme}]\n"
            "  lanes: [{name: admin}]\n  classes:\n    - {name: c, lane: admn}"
        ),
        [
            "d:10: unknown organisation `acmee`: did you mean `acme`? at `$.deployment.tenants[0].organisation`",
            "d:14: unknown lane `admn`: did you mean `admin`? at `$.deployment.classes[0].lane`",
        ],
    ),
    "budgets that are there twice, limit nothing, or count for nothing": (
        "- name: t",
        (
            "- name: t\n      budgets:\n"
            "        - {unit: tokens, per: day, hard: 5}\n"
            "        - {unit: tokens, per: day, soft: 5}\n"
            "        - {unit: usd, per: month, hard: 5}"
        ),
        [
            "d:12: budget `tokens/day` is already at `$.deployment.tenants[0].budgets[0]` at `$.deployment.tenants[0].budgets[1]`",
            "d:13: model `m`, which it may use, has no `price`: it would be free at `$.deployment.tenants[0].budgets[2]`",
        ],
    ),
    "a minimum above its maximum": (
        "- name: t",
        (
            "- name: t\n      minimum: 0.3\n      maximum: 0.2\n  lanes: [{name: l, maximum: 0.1, minimum: 0.11}]\n"
            "  classes: [{name: c, lane: l, maximum: 0.5, minimum: 0.6}]\n"
            "  organisations: [{name: o, minimum: 1, maximum: 0.5}]"
        ),
        [
            "d:10: 0.3 is above the maximum, 0.2 at `$.deployment.tenants[0].minimum`",
            "d:12: 0.11 is above the maximum, 0.1 at `$.deployment.lanes[0].minimum`",
            "d:13: 0.6 is above the maximum, 0.5 at `$.deployment.classes[0].minimum`",
            "d:14: 1 is above the maximum, 0.5 at `$.deployment.organisations[0].minimum`",
        ],
    ),
    "minimums of lanes and classes of more than there is": (
        "- name: t",
        (
            "- name: t\n  lanes:\n    - {name: l, minimum: 0.5}\n    - {name: k}\n  classes:\n"
            "    - {name: a, minimum: 0.3}\n    - {name: b, minimum: 0.3}\n"
            "    - {name: c, lane: k, minimum: 0.7}\n    - {name: d, lane: k, minimum: 0.4}"
        ),
        [
            (
                "d:15: minimums of lanes and classes add up to 1.1, of 1 that there is "
                "at `$.deployment.classes[1].minimum`"
            ),
            (
                "d:17: minimums in lane `k` add up to 1.1, of 1 that there is "
                "at `$.deployment.classes[3].minimum`"
            ),
        ],
    ),
    "minimums of organisations and tenants of more than there is": (
        "- name: t",
        (
            "- {name: t, minimum: 0.6}\n    - {name: u, minimum: 0.5, organisation: o}\n"
            "    - {name: v, minimum: 0.6, organisation: o}\n"
            "    - {name: w, minimum: 0.1, classes: [batch]}\n"
            "  organisations: [{name: o, minimum: 0.35}]"
        ),
        [
            (
                "d:11: minimums in organisation `o`, class `interactive` add up to 1.1, of 1 that there is "
                "at `$.deployment.tenants[2].minimum`"
            ),
            (
                "d:13: minimums in class `batch` add up to 1.05, of 1 that there is "
                "at `$.deployment.organisations[0].minimum`"
            ),
        ],
    ),
    "an engine called as one without a name": (
        "- name: t",
        "- name: t\nupstreams:\n- {url: 'http://h', pool: p}\n- {url: 'http://i', pool: p, name: p-0}",
        [
            (
                "d:12: a replica without a name of its own is called `p-0` already at `$.upstreams[1].name`"
            )
        ],
    ),
    "addresses that are none": (
        "- name: t",
        "- name: t\nupstreams:" + "".join(f"\n- {{url: '{url}', pool: p}}" for url in NO_PLACES),
        [
            f"d:{11 + nth}: `{url}` has no host, or a port that is none at `$.upstreams[{nth}].url`"
            for nth, url in enumerate(NO_PLACES)
        ],
    ),
    "two keys of one hash": (
        "- name: t",
        (
            f"- name: t\nkeys:\n  - {{name: a, tenant: t, hash: '{HASH}'}}\n"
            f"  - {{name: b, tenant: t, hash: '{HASH}'}}"
        ),
        [
            f"d:12: hash of a key `{HASH}` is already at `$.keys[0].hash` at `$.keys[1].hash`",
        ],
    ),
    "unknown model of a pool": (
        "model: m",
        "model: n",
        [
            "d:3: model `m` has no pool at `$.deployment.models[0]`",
            "d:6: unknown model `n` at `$.deployment.pools[0].model`",
        ],
    ),
    "a price for a model that is none": (
        "- name: t",
        (
            "- name: t\n  fairness:\n    cost:\n      kind: money\n      as_of: 2025-01\n"
            "      price: {input: 1, output: 3}\n      models:\n"
            "        n: {input: 1, output: 3}"
        ),
        ["d:15: unknown model `n` at `$.deployment.fairness.cost.models`"],
    ),
    "unknown class of a pool": (
        "model: m",
        "model: m\n      classes: [interactiv]",
        [
            (
                "d:7: unknown class `interactiv`: did you mean `interactive`? "
                "at `$.deployment.pools[0].classes[0]`"
            )
        ],
    ),
    "unknown model and class of a tenant": (
        "- name: t",
        "- name: t\n      models: [m, x]\n      classes:\n        - batch\n        - zzz",
        [
            "d:10: unknown model `x` at `$.deployment.tenants[0].models[1]`",
            "d:13: unknown class `zzz` at `$.deployment.tenants[0].classes[1]`",
        ],
    ),
    "population of nobody": (
        "- name: t",
        (
            "- name: t\n  slos:\n    - name: s\n      objectives: []\n      population:\n"
            "        slo_class: x\n        tenant: y\n        model: z\n        region: eu\n"
            "        model_revision: '9'"
        ),
        [
            "d:14: unknown class `x` at `$.deployment.slos[0].population.slo_class`",
            "d:15: unknown tenant `y` at `$.deployment.slos[0].population.tenant`",
            "d:16: unknown model `z` at `$.deployment.slos[0].population.model`",
            "d:17: unknown region `eu` at `$.deployment.slos[0].population.region`",
            "d:18: unknown revision `9` at `$.deployment.slos[0].population.model_revision`",
        ],
    ),
    "agreement on nothing with nobody": (
        "- name: t",
        "- name: t\n  slas:\n    - customer: u\n      slos: [s]",
        [
            "d:11: unknown tenant `u` at `$.deployment.slas[0].customer`",
            "d:12: unknown SLO `s` at `$.deployment.slas[0].slos[0]`",
        ],
    ),
    "key of nobody": (
        "- name: t",
        f"- name: t\nkeys:\n  - name: k\n    tenant: u\n    hash: {HASH}",
        ["d:12: unknown tenant `u` at `$.keys[0].tenant`"],
    ),
    "half of a split pool": (
        "- name: p",
        "- name: p\n      role: prefill",
        ["d:6: split pools are not served yet; use `both` at `$.deployment.pools[0].role`"],
    ),
    "other half of a split pool": (
        "- name: p",
        "- role: decode\n      name: p",
        ["d:5: split pools are not served yet; use `both` at `$.deployment.pools[0].role`"],
    ),
    "class that a tenant lists and no pool serves": (
        "model: m\n      profile: h100-8b-tp1\n  tenants:\n    - name: t",
        (
            "model: m\n      profile: h100-8b-tp1\n      classes: [interactive]\n"
            "  tenants:\n    - name: t\n      classes: [interactive, batch]"
        ),
        [
            (
                "d:11: class `batch` is served by no pool of a model it may use "
                "at `$.deployment.tenants[0].classes[1]`"
            )
        ],
    ),
}

# (BASE's text, what replaces it, lines of all warnings)
DOUBTFUL = {
    "consent to nothing": (
        "- name: t",
        "- name: t\n      degrade: 2",
        [
            (
                "d:10: none of its classes has a ladder (`classes[].degrade`): it is served as asked "
                "at `$.deployment.tenants[0].degrade`"
            )
        ],
    ),
    "a ladder that nobody agreed to": (
        "- name: t",
        "- name: t\n  classes: [{name: c, degrade: {level: 2}}]",
        [
            (
                "d:10: no tenant agreed to less (`tenants[].degrade`): its requests are served as asked "
                "at `$.deployment.classes[0].degrade`"
            )
        ],
    ),
    "a smaller model that nobody agreed to": (
        "- name: t",
        "- name: t\n      degrade: 2\n  classes: [{name: c, degrade: {level: 3, model: m}}]",
        [
            (
                "d:11: no tenant that agreed to level 3 may use `m` "
                "at `$.deployment.classes[0].degrade.model`"
            )
        ],
    ),
    "a ladder whose end is a queue that is not there": (
        "- name: t",
        "- name: t\n      degrade: 2\n  classes: [{name: c, degrade: {defer: true}}]",
        [
            (
                "d:11: there is no queue to defer to (`jobs.file`): what no step can save is refused "
                "at `$.deployment.classes[0].degrade.defer`"
            )
        ],
    ),
    "a ladder whose end nobody agreed to": (
        "- name: t",
        (
            "- name: t\n      degrade: 1\n  classes: [{name: c, degrade: {defer: true}}]\n"
            "jobs: {file: j.db}"
        ),
        [
            (
                "d:11: no tenant agreed to all of the ladder: what no step can save is refused "
                "at `$.deployment.classes[0].degrade.defer`"
            )
        ],
    ),
    "a ladder whose end somebody agreed to": (
        "- name: t",
        (
            "- name: t\n      degrade: 2\n  classes: [{name: c, degrade: {defer: true}}]\n"
            "jobs: {file: j.db}"
        ),
        [],
    ),
    "a ladder that somebody agreed to": (
        "- name: t",
        "- name: t\n      degrade: 2\n  classes: [{name: c, degrade: {}}]",
        [],
    ),
    "class that any tenant may use and no pool serves": (
        "model: m",
        "model: m\n      classes: [interactive, batch, best_effort]",
        [
            (
                "d:10: it may use class `long_reasoning` of model `m`, which no pool serves "
                "at `$.deployment.tenants[0]`"
            )
        ],
    ),
    "class of a lane that no tenant names": (
        "- name: t",
        "- name: t\n  lanes: [{name: l}]\n  classes:\n    - {name: c}\n    - {name: d, lane: l}",
        [
            (
                "d:13: it is of lane `l`, and no tenant names it: nobody may use it "
                "at `$.deployment.classes[1]`"
            )
        ],
    ),
    "tenant that names none of the classes, which all are of lanes": (
        "- name: t",
        "- name: t\n    - {name: u, classes: [d]}\n  lanes: [{name: l}]\n  classes: [{name: d, lane: l}]",
        [
            "d:9: it names no class, and each belongs to a lane: it may use none at `$.deployment.tenants[0]`"
        ],
    ),
    "pool of another revision than its model's": (
        "- name: p",
        "- name: p\n      revision: '2'",
        [
            (
                "d:6: model `m` is of revision `1`: whoever asks for it is sent here too and gets `2` "
                "at `$.deployment.pools[0].revision`"
            )
        ],
    ),
    "pool of its model's revision": (
        "- name: m\n  pools:\n    - name: p",
        "- {name: m, revision: '2'}\n  pools:\n    - name: p\n      revision: '2'\n      role: both",
        [],
    ),
    "quota below one request": (
        "- name: t",
        "- name: t\n      tpm_limit: 1000",
        [
            (
                "d:10: 1000 tokens per minute never admit a request of the full context of 131072 "
                "at `$.deployment.tenants[0].tpm_limit`"
            )
        ],
    ),
    "window below one step": (
        "  tenants:",
        "  window:\n    prefill_ms: 5\n  tenants:",
        [
            (
                "d:9: 5 ms is less than one full step of pool `p`, 12.1 ms "
                "at `$.deployment.window.prefill_ms`"
            )
        ],
    ),
    "context that does not fit the pool": (
        "- name: m",
        "- name: m\n      context_limit: 1000000",
        [
            (
                "d:8: its KV pool of 430000 tokens is smaller than the context limit of `m`, 1000000 "
                "at `$.deployment.pools[0].profile`"
            )
        ],
    ),
    "threshold inside a bucket": (
        "- name: t",
        (
            "- name: t\n  slos:\n    - name: s\n      objectives:\n"
            "        - {indicator: gap, per: gap, threshold_ms: 83}"
        ),
        [
            (
                "d:13: 83 ms is neither the class's itl_ms nor an edge of a bucket: only gaps up to "
                "80 ms count as met at `$.deployment.slos[0].objectives[0].threshold_ms`"
            )
        ],
    ),
    "threshold that is the class's own": (
        "- name: t",
        (
            "- name: t\n  classes: [{name: c, itl_ms: 83}]\n  slos:\n    - name: s\n"
            "      objectives:\n        - {indicator: gap, per: gap, threshold_ms: 83}"
        ),
        [],
    ),
    "open to the network": (
        "- name: t",
        "- name: t\nserver:\n  host: 0.0.0.0\n  trusted_replay: true",
        [
            "d:11: open to the network at 0.0.0.0 without any key at `$.server.host`",
            (
                "d:12: any caller on the network may set the length of answers "
                "at `$.server.trusted_replay`"
            ),
        ],
    ),
    "an engine with the name that it would have": (
        "- name: t",
        "- name: t\nupstreams: [{url: 'http://[::1]:80/v1', pool: p, name: p-0}]",
        [],
    ),
    "minimums of all that there is, and of classes that not all may use": (
        "- name: t",
        (
            "- {name: t, minimum: 0.6, classes: [batch]}\n    - {name: u, minimum: 0.9, classes: [interactive]}\n"
            "    - {name: v, minimum: 0.1}\n  organisations: [{name: o, minimum: 0.9}]"
        ),
        [],
    ),
    "steps of engines that do not heed them": (
        "- name: t",
        (
            "- name: t\n  window: {step_tokens: {p: 256}}\n"
            "emulator: {batching: {kind: decode_first}}"
        ),
        [
            (
                "d:10: the engines fill their steps as `emulator.batching` says, whatever stands here "
                "at `$.deployment.window.step_tokens.p`"
            )
        ],
    ),
    "deferred to nowhere": (
        "- name: t",
        "- name: t\n  classes: [{name: c, defer: always}, {name: d, defer: asked}]",
        [
            (
                "d:10: there is no queue to defer to (`jobs.file`): its requests are answered at once "
                "at `$.deployment.classes[0].defer`"
            )
        ],
    ),
    "deferred to somewhere": (
        "- name: t",
        "- name: t\n  classes: [{name: c, defer: always}]\njobs: {file: jobs.db}",
        [],
    ),
    "open to this machine": (
        "- name: t",
        "- name: t\nserver: {host: localhost, trusted_replay: true}",
        [],
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_error_stops_the_start_with_line_and_path(case: str) -> None:
    old, new, messages = WRONG[case]
    assert old in BASE
    with pytest.raises(ConfigError) as caught:
        resolved(BASE.replace(old, new), "d", Path(), {}, {})
    assert str(caught.value).splitlines() == messages


@pytest.mark.parametrize("case", list(DOUBTFUL))
def test_warning_names_line_and_path(case: str) -> None:
    old, new, messages = DOUBTFUL[case]
    assert old in BASE
    found = resolved(BASE.replace(old, new), "d", Path(), {}, {})
    assert [str(fault) for fault in found.warnings] == messages


def test_problems_are_told_by_severity() -> None:
    text = BASE.replace("model: m", "model: n").replace(
        "- name: t", "- name: t\n      tpm_limit: 9"
    )
    found = problems(parse(text, Settings, "d"))
    assert [one.severity for one in found] == [Severity.ERROR, Severity.ERROR, Severity.WARNING]


def test_unserved_pairs_are_told_once_however_many_tenants_there_are() -> None:
    tenants = "".join(f"\n    - name: t{i}" for i in range(50))
    text = BASE.replace("model: m", "model: m\n      classes: [interactive, batch, best_effort]")
    assert len(problems(parse(text.rstrip() + tenants, Settings, "d"))) == 1


def test_example_has_no_problems() -> None:
    assert problems(load(EXAMPLE, Settings)) == []


def test_engines_that_come_later_may_be_asked_for_counts() -> None:
    counts = "token_counts:\n  models:\n    - {kind: engine, model: m}\n"
    written = BASE.replace("model: m\n", "model: m\n      replicas: 0\n") + counts
    resolved(written, "d", Path(), {}, {})


def test_emulator_noise_is_handed_on_in_millionths() -> None:
    assert load(EXAMPLE, Settings).emulator.noise_ppm() == 20_000


def _patterns(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for below in schema:
            yield from _patterns(below)


def test_no_pattern_lets_a_line_break_follow() -> None:
    """`$` matches before a last line break; and a JSON schema must do without Python's own `\\Z`."""
    found = set(_patterns(msgspec.json.schema(Settings)))
    assert len(found) >= 5
    assert {one for one in found if not one.endswith(END) or "\\Z" in one} == set()
    for text in ("a", "both", "https://h", "sha256:" + "0" * 64):
        fits = {one for one in found if re.search(one, text)}
        assert fits
        assert {one for one in fits if re.search(one, text + "\n")} == set()

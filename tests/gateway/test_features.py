"""What a model does not do is refused before an engine hears of it, with the field that asked."""

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.gateway.errors import FEATURES
from headrace.model.deployment import ModelSpec, TenantSpec
from headrace.model.features import EVERY, Feature
from headrace.policy.admission.gates import Gates, Mode, Modes
from headrace.policy.catalog import PlaneConfig
from tests.gateway.scenes import MODEL, Gateway, ObedientEngine, deployment, reach

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
SAID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
FORM = {"type": "json_schema"}
ASKED: list[tuple[Feature, str, dict[str, Any], str]] = [
    (Feature.STREAMING, CHAT, {"stream": True}, "stream"),
    (Feature.STREAMING, MESSAGES, {"stream": True}, "stream"),
    (Feature.TOOLS, CHAT, {"tools": TOOLS}, "tools"),
    (Feature.TOOLS, RESPONSES, {"tools": TOOLS}, "tools"),
    (Feature.JSON, CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (Feature.SCHEMA, CHAT, {"response_format": FORM}, "response_format"),
    (Feature.SCHEMA, RESPONSES, {"text": {"format": FORM}}, "text.format"),
    (Feature.LOGPROBS, CHAT, {"logprobs": True}, "logprobs"),
    (Feature.LOGPROBS, COMPLETIONS, {"logprobs": 0}, "logprobs"),
    (Feature.LOGPROBS, RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
    (Feature.BEST_OF, COMPLETIONS, {"best_of": 2}, "best_of"),
    (Feature.PRIORITY, CHAT, {"priority": 3}, "priority"),
]


def without(feature: Feature, gates: Gates | None = None) -> PlaneConfig:
    can = tuple(one for one in EVERY if one is not feature)
    models = (ModelSpec(name=MODEL, features=can, fan_out_limit=4), ModelSpec(name="other"))
    return replace(deployment(), models=models, admission=gates or Gates())


@pytest.mark.parametrize(("feature", "path", "fields", "param"), ASKED)
async def test_what_a_model_lacks_is_refused_with_the_field_that_asks(
    feature: Feature, path: str, fields: dict[str, Any], param: str
) -> None:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)], config=without(feature))
    body = {"model": MODEL, **SAID[path], **fields}
    caller = await gateway.ask(path=path, body=body).done()
    error = caller.error
    assert (caller.status, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert feature.value in error["message"]
    assert error["headrace"]["gate"] == "contract"
    assert caller.headers["x-should-retry"] == "false"
    gateway.finish()


@pytest.mark.parametrize(("feature", "path", "fields", "param"), ASKED)
async def test_it_is_let_in_where_the_contract_gate_only_records_or_nobody_asks_for_it(
    feature: Feature, path: str, fields: dict[str, Any], param: str
) -> None:
    audit = Gates(modes=Modes(contract=Mode.AUDIT))
    for gates, told in ((audit, fields), (Gates(), {})):
        gateway = Gateway(config=without(feature, gates))
        caller = gateway.ask(path=path, body={"model": MODEL, **SAID[path], **told})
        assert (await caller.done()).status == 200, param
        gateway.finish()


async def test_every_feature_has_a_field() -> None:
    assert set(FEATURES) == set(Feature) == {feature for feature, *_ in ASKED}


# Adapters ------------------------------------------------------------------------------------


def with_adapters(*, allowed: tuple[str, ...] = ()) -> PlaneConfig:
    models = (ModelSpec(name=MODEL, adapters=("sql", "law")), ModelSpec(name="other"))
    tenants = (TenantSpec(name="free", models=allowed),)
    return replace(deployment(tenants=tenants), models=models)


async def test_an_adapter_is_served_by_its_models_engines_under_its_own_name() -> None:
    gateway = Gateway(lambda clock: [ObedientEngine(clock)], config=with_adapters())
    engine = gateway.engines[0]
    assert isinstance(engine, ObedientEngine)
    for nth, (model, adapter) in enumerate((("sql", "sql"), (MODEL, None)), 1):
        caller = gateway.ask(model=model)
        await reach(gateway.clock, nth * 10)
        call = engine.calls[-1]
        assert call.ask.adapter == adapter
        live = gateway.driver.plane.state.live[call.dispatch.request]
        assert (live.model, live.demand.adapter) == (MODEL, adapter or "")
        caller.leave()
        await caller.done()
    unknown = await gateway.ask(model="nobody's").done()
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    gateway.finish()


@pytest.mark.parametrize(
    ("allowed", "listed"),
    [
        ((), [MODEL, "sql", "law", "other"]),
        ((MODEL,), [MODEL, "sql", "law"]),
        (("law",), ["law"]),
        (("other",), ["other"]),
    ],
)
async def test_a_key_may_use_a_model_with_its_adapters_or_one_of_them_alone(
    allowed: tuple[str, ...], listed: list[str]
) -> None:
    gateway = Gateway(config=with_adapters(allowed=allowed))
    shown = await gateway.ask(path="/v1/models", method="GET").done()
    assert [row["id"] for row in shown.json["data"]] == listed
    for name in (MODEL, "sql", "law"):
        caller = await gateway.ask(model=name, max_tokens=1).done()
        assert caller.status == (200 if name in listed else 403), name
    gateway.finish()

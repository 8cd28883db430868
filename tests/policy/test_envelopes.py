"""What a pool's fingerprint is made of, and that the plane takes a replica to complete what was measured."""

from msgspec.structs import replace

from headrace.config.profiles import load_profile
from headrace.model.deployment import ClassSpec, ModelSpec, PoolSpec, TenantSpec
from headrace.model.envelope import DECLARED_RATE, Envelope, Origin
from headrace.model.ids import ModelName, PoolName
from headrace.policy.admission.gates import GateMode, Gates
from headrace.policy.catalog import PlaneConfig, Window
from headrace.policy.envelopes import fingerprint, policy_revision, reading
from headrace.policy.ordering.orders import EarliestDeadline
from headrace.units import MICRO
from tests.plane.scenes import Driver

POOL = PoolSpec(name="p", model="m", profile=load_profile("h100-70b-tp4"), revision="7")
PLANE = PlaneConfig(
    models=(ModelSpec(name="m", revision="7", quantization="fp8"),),
    pools=(POOL,),
    tenants=(TenantSpec(name="t"),),
    classes=(ClassSpec(name="chat", tpot_ms=50.0), ClassSpec(name="batch", ttft_ms=None)),
)


def measured(work_rate: float = 0.55) -> Envelope:
    mark = fingerprint(PLANE, POOL)
    return Envelope(
        fingerprint=replace(mark, promises={"chat": mark.promises["chat"]}, mix="conv"),
        work_rate=work_rate, low=0.5, high=0.6, request_rate=5.0, attainment={"chat": 0.9},
        seeds=(0, 1, 2), measured_at_s=0,
    )  # fmt: skip


def test_a_fingerprint_tells_weights_hardware_steps_and_bounds() -> None:
    mark = fingerprint(PLANE, POOL)
    assert mark.kind == ("m", "H100 SXM 80 GB", 4, 1)
    assert (mark.revision, mark.quantization, mark.step_tokens) == ("7", "fp8", 512)
    assert mark.profile.startswith("h100-70b-tp4 ")
    chat = mark.promises["chat"]
    assert (chat.ttft_ms, chat.gap_ms, chat.tpot_ms) == (2_000.0, 80.0, 50.0)
    assert mark.promises["batch"].ttft_ms is None
    assert mark.engine == mark.scheduler == mark.mix == ""


def test_other_step_times_are_another_profile_and_other_words_are_not() -> None:
    told = fingerprint(PLANE, POOL).profile
    slower, renamed = POOL.profile.paced(1.1), replace(POOL.profile, source="elsewhere")
    assert fingerprint(PLANE, replace(POOL, profile=slower)).profile != told
    assert fingerprint(PLANE, replace(POOL, profile=renamed)).profile == told


def test_steps_that_are_set_while_it_runs_are_those_of_the_fingerprint() -> None:
    changed = replace(PLANE, window=Window(step_tokens={"p": 1_024}))
    mark = fingerprint(changed, POOL)
    assert mark.step_tokens == 1_024
    assert replace(mark, step_tokens=512) == fingerprint(PLANE, POOL)


def test_gates_and_orders_are_no_part_of_the_policy_that_it_was_measured_under() -> None:
    told = policy_revision(PLANE)
    gated = replace(PLANE, admission=Gates(mode=GateMode.AUDIT), ordering=EarliestDeadline())
    assert policy_revision(gated) == told
    assert policy_revision(replace(PLANE, window=Window(kv_reserve=0.2))) != told


def test_what_is_declared_wins_over_what_was_measured_and_that_over_a_guess() -> None:
    both = replace(POOL, work_rate=0.3, envelopes=(measured(),))
    assert (reading(PLANE, both).work_rate, reading(PLANE, both).origin) == (0.3, Origin.DECLARED)
    read = reading(PLANE, replace(both, work_rate=None))
    assert (read.work_rate, read.origin) == (0.55, Origin.MEASURED)
    assert reading(PLANE, POOL).work_rate == DECLARED_RATE


def test_the_plane_starts_from_what_was_measured() -> None:
    plane = replace(PLANE, pools=(replace(POOL, envelopes=(measured(),)),))
    rates = Driver(plane).plane.state.models[ModelName("m")].rates
    assert rates[PoolName("p")].micro() == round(0.55 * MICRO)

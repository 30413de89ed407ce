"""Tests of what a configuration's algorithm needs, and of refusals before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from jackfield.algorithms import algorithm, names, part, register, registry
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.compose.resolve import resolve_algorithm
from jackfield.config import RunConfig, make_config
from jackfield.errors import ConfigError
from jackfield.plugins import Manifest
from jackfield.trainer.weights import LogProbCheck


def rollout(**capabilities: Any) -> Manifest:
    return Manifest(
        name="some", kind="rollout", abi="1.0", object="some:Server", config="some:Config", capabilities=capabilities
    )


def resolved_config(*overrides: str) -> RunConfig:
    return make_config({"model": {"path": "somewhere"}}, overrides)


def resolved(*overrides: str, server: Manifest | None = None) -> ResolvedAlgorithm:
    config = resolved_config(*overrides)
    return resolve_algorithm(config, server or rollout(engine_log_probs="full"))


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(*overrides)
    return caught.value


#: Loss columns of bundles, without the ``rollout_weights`` of a correction.
COLUMNS = {
    "grpo": {"advantages", "old_log_probs"},
    "rloo": {"advantages"},
    "decoupled_ppo": {"advantages", "old_log_probs", "rollout_log_probs"},
    "m2po": {"advantages", "old_log_probs", "m2po_mask"},
    "opmd_kimi": {"advantages", "old_log_probs"},
    "opmd_pairwise": {"advantages", "old_log_probs", "opmd_group_means", "opmd_group_sizes"},
    "mix": {"advantages", "old_log_probs", "expert_mask"},
    "sft": set[str](),
    "dpo": {"ref_log_probs", "dpo_margins", "dpo_signs"},
}
TOLD = {
    "mix": ("data.expert=e.jsonl", "data.expert_samples_per_batch=2"),
    "mix_chord": ("data.expert=e.jsonl", "data.expert_samples_per_batch=2"),
    "gdpo": ("algorithm.reward_dimensions=[score, brief]",),
    "sft": ("mode=offline",),
    "dpo": ("mode=offline", "data.format.rejected_key=worse"),
}


@pytest.mark.parametrize("name", names("algorithm"))
def test_every_bundle_is_resolved_so_that_its_parts_are_supplied(name: str) -> None:
    named, found = algorithm(name), resolved(f"algorithm.name={name}", *TOLD.get(name, ()))
    loss = part("loss", found.loss)
    given = {"log_probs", "response_mask", "global_tokens", "global_sequences", *found.loss_columns}
    assert set(loss.needs) <= given
    assert ("critic" in named.needs) == found.critic
    assert ("dynamic_sampling" in named.needs) == found.dynamic_sampling
    assert ("baseline_rewards" in named.needs) == found.greedy_baseline
    assert ("prepare" in named.needs) == found.prepares
    assert ("pairs" in named.needs) == found.pairs
    assert ("reference" in named.needs) == found.reference


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_the_loss_come_from_its_signature(name: str) -> None:
    assert COLUMNS[name] == set(resolved(f"algorithm.name={name}", *TOLD.get(name, ())).loss_columns)


def test_a_part_that_replaces_the_bundles_brings_its_own_needs_and_defaults() -> None:
    with_critic = resolved("algorithm.advantages.name=gae")
    assert with_critic.critic
    other_options = resolved("algorithm.name=dapo", "algorithm.loss.options.clip_high=0.4").loss_options
    plain = {"aggregation": "token-mean"}
    assert {"clip_low": 0.2, "clip_high": 0.4, "clip_dual": None, **plain} == other_options
    assert plain == resolved("algorithm.name=dapo", "algorithm.loss.name=gspo").loss_options


def test_a_users_loss_gets_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))

    @register("loss", "leashed", "token")
    def leashed(log_probs: Any, advantages: Any, ref_log_probs: Any, rewards: Any, *, strength: float = 1.0) -> Any:
        """an example."""

    found = resolved("algorithm.loss.name=leashed")
    assert ["advantages", "ref_log_probs", "rewards"] == list(found.loss_columns)
    assert found.reference
    assert "rewards" in found.loss_columns


@pytest.mark.parametrize(
    ("server", "overrides", "corrects"),
    [
        ({"engine_log_probs": "full"}, (), False),
        ({"engine_log_probs": "partial"}, (), True),
        ({}, (), True),
        ({"engine_log_probs": "full"}, ("model.dtype=bfloat16",), True),
        ({"engine_log_probs": "full"}, ("engine={name: fsdp, mixed_precision: bfloat16}",), True),
        ({}, ("algorithm.correction.enabled=false",), False),
        ({"engine_log_probs": "full"}, ("algorithm.correction.enabled=true",), True),
        ({}, ("algorithm.name=decoupled_ppo",), False),
        ({}, ("algorithm.name=gmpo",), False),
        ({}, ("algorithm.name=sft", "mode=offline"), False),
    ],
)
def test_the_correction_is_on_where_numerics_differ(
    server: dict[str, Any], overrides: tuple[str, ...], corrects: bool
) -> None:
    """It stays off if the loss weights itself or takes no weights, or if nothing was sampled."""
    found = resolved(*overrides, server=rollout(**server))
    assert corrects == (found.correction is not None) == ("rollout_weights" in found.loss_columns)
    if corrects:
        column = found.loss_columns["old_log_probs"]
        assert ("old_log_probs", "old_log_probs", True) == (found.old_log_probs, column, found.recompute_old_log_probs)


def test_bypass_only_rejects_and_decoupled_weighs() -> None:
    reject = ("algorithm.correction.enabled=true", "algorithm.correction.reject=sequence-mean")
    bypass = resolved(*reject, "algorithm.old_log_probs=rollout")
    assert bypass.correction is not None
    assert ("none", "sequence-mean") == (bypass.correction.bound, bypass.correction.reject)
    assert "rollout_log_probs" == bypass.loss_columns["old_log_probs"]
    config = make_config({"model": {"path": "somewhere"}})
    role: Any = SimpleNamespace(config=config, algorithm=bypass, updated=0, explores=True)
    comparison = LogProbCheck(role=role).comparison(0)
    assert comparison is not None
    assert "log_probs" == comparison.engine, "old_log_probs are the rollout's there"
    decoupled = resolved(*reject)
    assert decoupled.correction is not None
    assert ("truncate", "old_log_probs") == (decoupled.correction.bound, decoupled.loss_columns["old_log_probs"])


def test_old_log_probs_are_recomputed_only_where_somebody_reads_them() -> None:
    assert resolved("algorithm.old_log_probs=engine").recompute_old_log_probs
    assert not resolved("algorithm.name=rloo", "algorithm.old_log_probs=engine").recompute_old_log_probs


@pytest.mark.parametrize(
    ("overrides", "where", "code"),
    [
        (("algorithm.advantages.name=optimal_token_baseline",), "algorithm", "config.invalid-value"),
        (("mode=offline",), "mode", "config.invalid-value"),
        (("algorithm.name=sft",), "mode", "config.invalid-value"),
        (("algorithm.name=mix",), "data.expert", "config.missing-key"),
        (("algorithm.name=gdpo",), "algorithm.reward_dimensions", "config.missing-key"),
        (
            ("algorithm.name=dpo", "mode=offline", "data.format.response_key=better"),
            "data.format.rejected_key",
            "config.missing-key",
        ),
        (("data.format.rejected_key=worse",), "data.format.rejected_key", "config.invalid-value"),
        (("data.expert=e.jsonl",), "data.expert", "config.invalid-value"),
        (("algorithm.reward_dimensions=[score]",), "algorithm.reward_dimensions", "config.invalid-value"),
        (("critic.clip=null",), "critic", "config.invalid-value"),
        (("weights.block_bytes=64",), "weights", "config.invalid-value"),
        (("weights.on_missing_base=stop",), "weights", "config.invalid-value"),
        (("algorithm.kl.target=1",), "algorithm.kl.target", "config.invalid-value"),
        (
            ("algorithm.name=gdpo", "algorithm.reward_dimensions=[score]", "algorithm.shaping.normalize=true"),
            "algorithm.shaping",
            "config.invalid-value",
        ),
        (
            ("algorithm.correction.enabled=true", "algorithm.old_log_probs=rollout"),
            "algorithm.correction",
            "config.invalid-value",
        ),
        (
            ("algorithm.loss.name=dro", "algorithm.correction.enabled=true"),
            "algorithm.correction",
            "config.invalid-value",
        ),
    ],
)
def test_what_cannot_be_had_or_does_nothing_is_refused(overrides: tuple[str, ...], where: str, code: str) -> None:
    error = refused(*overrides)
    assert (where, code) == (error.where, error.code), str(error)


def test_a_setting_without_effect_says_what_mends_it() -> None:
    for overrides, fix in (
        (("mixing.made={ratio: 1}",), "leave out mixing.made, or use a loss with an expert (mix)"),
        (("mixing.made={ratio: 1}", "algorithm.name=mix"), "leave out mixing.made, or use data.pipeline.experiences"),
    ):
        error = refused(*overrides)
        assert ("config.invalid-value", "mixing.made", fix) == (error.code, error.where, error.fix)


def test_one_rollout_per_task_is_refused_where_rollouts_are_compared() -> None:
    """All advantages would be 0, and the run would learn nothing."""
    one = "data.rollouts_per_group=1"
    for name in ("grpo", "rloo"):
        error = refused(f"algorithm.name={name}", one)
        assert ("config.invalid-value", "data.rollouts_per_group") == (error.code, error.where)
    for advantages in ("step_wise_grpo", "grpo_passk"):
        assert "data.rollouts_per_group" == refused(f"algorithm.advantages.name={advantages}", one).where
    for name in ("name=ppo", "name=remax", "advantages.name=reinforce", "advantages.name=gigpo"):
        assert resolved(f"algorithm.{name}", one).advantages  # gigpo also compares the steps of one rollout
    assert resolved("algorithm.name=sft", "mode=offline", one).advantages is None


def test_an_algorithm_says_that_it_has_to_see_a_whole_batch() -> None:
    wide = ("reinforce_plus_plus", "m2po")
    assert ["group", "group", "batch", "batch"] == [algorithm(name).scope for name in ("grpo", "opmd_pairwise", *wide)]
    assert "batch" == attrs.evolve(algorithm("grpo"), advantages_options={"std": "batch"}).scope


def test_the_probe_allows_what_rounding_explains() -> None:
    assert [0.01, 0.25, 0.25, 0.25, 0.01, 0.5, 0.75] == [
        make_config({"model": {"path": "somewhere"}}, overrides).rollout_bound
        for overrides in (
            (),
            ("model.dtype=bfloat16",),
            ("engine={name: fsdp, mixed_precision: bfloat16}",),
            ("weights.dtype=bfloat16",),
            ("weights.dtype=float32",),
            ("weights.dtype=float8_e4m3fn",),
            ("weights.dtype=float8_e4m3fn", "log_prob_check.bound=0.75"),
        )
    ]


def test_a_mismatch_that_is_corrected_switches_the_correction_on() -> None:
    """If it is disabled or the loss takes no weights, the setting ``correct`` is refused."""
    assert "rollout_weights" not in resolved().loss_columns
    corrected = resolved("log_prob_check.on_mismatch=correct")
    assert "rollout_weights" in corrected.loss_columns
    assert corrected.recompute_old_log_probs
    assert (
        "rollout_weights"
        not in resolved("log_prob_check.on_mismatch=correct", "algorithm.name=decoupled_ppo").loss_columns
    )
    for overrides in (("algorithm.correction.enabled=false",), ("algorithm.name=sft", "mode=offline")):
        assert "log_prob_check.on_mismatch" == refused("log_prob_check.on_mismatch=correct", *overrides).where


ASYNC = "schedule.mode=async"
STREAM = ("schedule.stream_mini_batches=true", "algorithm.mini_batches=4")


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ((ASYNC, "schedule.sync_offset=1"), "schedule.sync_offset"),
        (("schedule.max_staleness=2",), "schedule.max_staleness"),
        (("schedule.on_stale=drop",), "schedule.on_stale"),
        ((ASYNC, "schedule.sync_interval=4", "schedule.max_staleness=2"), "schedule.max_staleness"),
        ((ASYNC, "schedule.sync_interval=2", "schedule.max_staleness=0"), "schedule.max_staleness"),
        ((ASYNC, "schedule.sync_interval=4", "schedule.max_staleness=3"), None),
        ((ASYNC, *STREAM), "schedule.stream_mini_batches"),
        ((STREAM[0],), "algorithm.mini_batches"),
        ((*STREAM, "data.groups_per_batch=3"), "algorithm.mini_batches"),
        ((*STREAM, "algorithm.name=reinforce_plus_plus"), "schedule.stream_mini_batches"),
        ((*STREAM, "algorithm.name=reinforce_plus_plus_baseline"), "schedule.stream_mini_batches"),
        ((*STREAM, "algorithm.name=gpg"), "schedule.stream_mini_batches"),
        ((*STREAM, "algorithm.name=ppo", "algorithm.advantages.options.whiten=true"), "schedule.stream_mini_batches"),
        (
            (*STREAM, "algorithm.correction={enabled: true, batch_normalize: true}"),
            "schedule.stream_mini_batches",
        ),
        ((*STREAM, "algorithm.scope=mini_batch"), "algorithm.scope"),
        (("schedule.partial_rollout=true",), "schedule.partial_rollout"),
        (("schedule.partial_rollout=true", "schedule.sync_interval=2"), None),
        (("algorithm.correction.stale_only=true",), "algorithm.correction.stale_only"),
        (
            ("algorithm.correction={enabled: false, max_token_staleness: 1}",),
            "algorithm.correction.max_token_staleness",
        ),
        (("schedule.partial_rollout=true", ASYNC, "cluster.placement=separate"), "schedule.partial_rollout"),
        (("algorithm.name=gpg", "algorithm.scope=mini_batch"), "algorithm.scope"),
        ((ASYNC, "schedule.on_stale=train_corrected", "algorithm.name=gmpo"), None),
        (
            (ASYNC, "schedule.on_stale=train_corrected", "algorithm.name=rloo", "algorithm.correction.enabled=false"),
            "schedule.on_stale",
        ),
        (("mode=offline", "algorithm.name=sft", "schedule.rollouts_in_flight=4"), "schedule.rollouts_in_flight"),
        (("mode=offline", "algorithm.name=sft", ASYNC), "schedule.mode"),
        (("mode=offline", "algorithm.name=sft", "schedule.sync_offset=1"), "schedule.sync_offset"),
        (("mode=train", "data.samples=kept", "schedule.sync_interval=2"), "schedule.sync_interval"),
        (
            (ASYNC, "algorithm.name=mix", "data.expert=e.jsonl", "data.expert_samples_per_batch=2"),
            "data.expert",
        ),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_by_name(overrides: tuple[str, ...], where: str | None) -> None:
    """The error also says what is expected, and how to fix it."""
    if where is None:
        resolved(*overrides)
    else:
        error = refused(*overrides)
        assert where == error.where
        assert error.expected
        assert error.fix


@pytest.mark.parametrize(
    "name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg", "grpo", "rloo", "opmd", "decoupled_ppo"]
)
def test_mini_batches_can_be_streamed_with_every_estimator_of_the_recipe(name: str) -> None:
    scope = ("algorithm.scope=mini_batch",) if name.startswith(("reinforce", "gpg")) else ()
    assert resolved(f"algorithm.name={name}", *STREAM, *scope)


def test_an_asynchronous_run_corrects_for_older_weights_unless_it_is_switched_off() -> None:
    exact = rollout(engine_log_probs="full")
    assert resolved(ASYNC, server=exact).correction is not None
    off = resolved(ASYNC, "algorithm.correction.enabled=false", server=exact)
    assert (None, "rollout_log_probs") == (off.correction, off.old_log_probs)
    decoupled = resolved(ASYNC, "algorithm.name=decoupled_ppo", server=exact)
    assert ("old_log_probs", True) == (decoupled.old_log_probs, decoupled.recompute_old_log_probs)

"""Settings of engines that do not fit are refused before a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield.compose.checks import check_settings
from jackfield.config import load_config
from jackfield.plugins import discover
from jackfield_testing import refused

GUIDES = Path(__file__).parents[2] / "examples" / "guides"
DECAYS = "optimizer.scheduler=linear"


def check(*overrides: str) -> Any:
    return check_settings(load_config(GUIDES / "minimal.yaml", overrides), discover())


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("optimizer.name=lion",), "optimizer.name"),
        (("optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]"), "optimizer.betas"),
        (("optimizer.name=sgd", "optimizer.options={nesterov: true}"), "optimizer.options.nesterov"),
        (("optimizer.options={foo: 1}",), "optimizer.options.foo"),
        (("optimizer.name=adamw_8bit", "optimizer.options={block_size: 0}"), "optimizer.options.block_size"),
        (("optimizer.lr_factors={'[': 0.5}",), "optimizer.lr_factors"),
        (("optimizer.lr_factors={q_proj: -1.0}",), "optimizer.lr_factors"),
        (("model.freeze=['(']",), "model.freeze"),
        ((DECAYS,), "optimizer.total_steps"),
        ((DECAYS, "optimizer.total_steps=2", "optimizer.warmup_steps=2"), "optimizer.total_steps"),
        (("optimizer.no_decay=[norms]", "optimizer.weight_decay=0"), "optimizer.no_decay"),
        (("algorithm.name=ppo", "critic.optimizer.ema_decay=0.5"), "critic.optimizer.ema_decay"),
        (("algorithm.name=ppo", "critic.optimizer.scheduler=cosine"), "critic.optimizer.total_steps"),
        (("model.value_head=true",), "model.value_head"),
        (("engine.shard_size=2",), "engine.shard_size"),
        (("engine.sequence_parallel=2",), "engine.sequence_parallel"),
        (("engine.attention=flex_attention",), "engine.attention"),
        (("cluster.device=xpu",), "cluster.device"),
        (("cluster.ray.engine_ranks=2",), "cluster.ray.engine_ranks"),
    ],
    ids=str,
)
def test_what_does_not_fit(overrides: tuple[str, ...], where: str) -> None:
    """The error names the setting."""
    with refused(("config.invalid-value", "config.unknown-key"), where) as caught:
        check(*overrides)
    assert where == caught.value.where


TWO = ("cluster.name=ray", "cluster.ray.engine_ranks=2", "transfer_queue.name=zmq")


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("engine.sequence_parallel=2", "model.router_aux_loss=0.01"), "engine.sequence_parallel"),
        (("engine.tensor_parallel=2", "model.lora={use_dora: true}"), "engine.tensor_parallel"),
        (("engine.tensor_parallel=2", "engine.compile=inductor"), "engine.compile"),
    ],
    ids=str,
)
def test_what_does_not_fit_on_two_ranks(overrides: tuple[str, ...], where: str) -> None:
    """Without the last setting, it is accepted."""
    check(*TWO, *overrides[:1])
    with refused("config.invalid-value", where):
        check(*TWO, *overrides)


def test_what_fits() -> None:
    """The same settings where they have an effect."""
    factors, kept = "optimizer.lr_factors={q_proj: 2.0}", ("optimizer.no_decay=[norms]", "optimizer.ema_decay=0.5")
    check(DECAYS, "optimizer.total_steps=9", "optimizer.min_lr_ratio=0.5", factors, "model.freeze=[embed]", *kept)

"""Tests of the advantage worker, which computes columns from columns and returns plain numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.algorithms import advantages
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.algorithms.shaping import Correction, Shaping
from jackfield.errors import ConfigError
from jackfield.queue import BatchMeta, Values
from jackfield.queue.meta import Lease
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.samples import AdvantageWorker
from jackfield.sdk.cells import column_from_rows, rows_of

SIZES = (2, 3, 1, 2)
GROUPS = ("a", "a", "b", "b")
REWARDS = (1.0, 0.0, 4.0, 2.0)


def jagged(rows: Sequence[Sequence[float]]) -> Any:
    return column_from_rows([torch.tensor(row, dtype=torch.float32) for row in rows])


class Batch:
    """A batch whose values are in its own backend."""

    def __init__(self, sizes: Sequence[int] = SIZES, groups: Sequence[str] = GROUPS, **tags: Sequence[Any]) -> None:
        self.sizes = sizes
        self.columns: dict[str, Any] = {
            "response_mask": column_from_rows([torch.ones(size, dtype=torch.bool) for size in sizes]),
            "rollout_log_probs": jagged([[-1.0] * size for size in sizes]),
        }
        each = [
            {"rollout": row, "response_tokens": size, "model_tokens": size, **{name: tags[name][row] for name in tags}}
            for row, size in enumerate(sizes)
        ]
        self.meta = BatchMeta(
            keys=tuple(f"train/0/0/0/{row}/0" for row in range(len(sizes))),
            tags=tuple(each),
            groups=tuple(groups),
            leases=(Lease("train", "trainer", 1),) * len(sizes),
        )

    def estimate(
        self, algorithm: ResolvedAlgorithm, coefficient: float = 0.0
    ) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Return metrics and written columns, as lists of rows for all samples but baselines."""

        async def main(rows: Values) -> tuple[dict[str, float], tuple[str, ...]]:
            metrics, written = await AdvantageWorker(rows, algorithm).estimate(self.meta, coefficient)
            return metrics, written.columns

        return self._run(main)

    def prepare(self, algorithm: ResolvedAlgorithm) -> dict[str, list[Any]]:
        async def main(rows: Values) -> tuple[None, tuple[str, ...]]:
            return None, (await AdvantageWorker(rows, algorithm).prepare(self.meta)).columns

        return self._run(main)[1]

    def _run(self, main: Callable[[Values], Any]) -> tuple[Any, dict[str, list[Any]]]:
        async def run() -> tuple[Any, dict[str, list[Any]]]:
            backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
            await backend.start()
            rows = Values(backend)
            await rows.put("train", self.meta.keys, self.columns)
            result, names = await main(rows)
            keys = [
                key
                for key, tags in zip(self.meta.keys, self.meta.tags, strict=True)
                if tags["rollout"] != tags.get("greedy_rollout")
            ]
            columns: Mapping[str, Any] = await rows.get("train", keys, names)
            return result, {name: [row.tolist() for row in rows_of(column)] for name, column in columns.items()}

        return asyncio.run(run())


def estimated(advantages: str, **fields: Any) -> ResolvedAlgorithm:
    return ResolvedAlgorithm(loss="ppo", advantages=advantages, **fields)


def scored(rewards: Sequence[float] = REWARDS, **more: Any) -> Batch:
    batch = Batch(**more)
    batch.columns["reward"] = jagged([[reward] for reward in rewards])
    return batch


def test_one_number_a_row_stands_on_the_last_token() -> None:
    metrics, found = scored().estimate(estimated("dr_grpo"))
    assert [[0.5, 0.5], [-0.5] * 3, [1.0], [-1.0, -1.0]] == found["advantages"]
    assert {"reward/mean": 1.75, "reward/max": 4.0, "reward/min": 0.0} == {
        name: metrics[name] for name in ("reward/mean", "reward/max", "reward/min")
    }
    _, to_go = scored().estimate(estimated("reinforce", advantages_options={"gamma": 0.5}))
    assert [[0.5, 1.0], [0.0, 0.0, 0.0], [4.0], [1.0, 2.0]] == to_go["returns"]


def test_rewards_per_token() -> None:
    batch = Batch()
    batch.columns["reward"] = jagged([[1.0, 2.0], [0.0, 0.0, 5.0], [3.0], [1.0, 0.0]])
    _, found = batch.estimate(estimated("reinforce"))
    assert [[3.0, 2.0], [5.0, 5.0, 5.0], [3.0], [1.0, 0.0]] == found["returns"]


def test_shaping_clips_then_normalises_then_punishes_length() -> None:
    shaping = Shaping(clip=(0.0, 2.0), normalize=True, overlong_length=3, overlong_buffer=2, overlong_factor=2.0)
    metrics, found = scored().estimate(estimated("reinforce", shaping=shaping))
    clipped = torch.tensor([1.0, 0.0, 2.0, 2.0])
    expected = (clipped - clipped.mean()) / clipped.std() + torch.tensor([-1.0, -2.0, 0.0, -1.0])
    assert [row[0] for row in found["returns"]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert 1.75 == metrics["reward/mean"], "the reward itself, before shaping"
    assert float(expected.mean()) == pytest.approx(metrics["reward/shaped_mean"], abs=1e-5)


@pytest.mark.parametrize("old", ["rollout_log_probs", "old_log_probs"])
def test_kl_in_the_reward_is_of_the_policy_that_the_loss_calls_old(old: str) -> None:
    batch = scored()
    batch.columns["old_log_probs"] = jagged([[-2.0] * size for size in SIZES])
    batch.columns["ref_log_probs"] = jagged([[-4.0] * size for size in SIZES])
    algorithm = ResolvedAlgorithm(
        loss="ppo", advantages="reinforce", kl_in_reward="k1", old_log_probs=old, reference=True
    )
    metrics, found = batch.estimate(algorithm, 0.5)
    kl = {"rollout_log_probs": 3.0, "old_log_probs": 2.0}[old]
    assert (kl, 0.5) == (metrics["reward/kl"], metrics["reward/kl_coefficient"])
    assert [reward - 0.5 * kl * size for reward, size in zip(REWARDS, SIZES, strict=True)] == [
        row[0] for row in found["returns"]
    ]


def test_values_of_a_critic_reach_gae() -> None:
    batch = scored()
    batch.columns["values"] = jagged([[0.5] * size for size in SIZES])
    _, found = batch.estimate(estimated("gae"))
    assert [[0.5, 0.5], [-0.5] * 3, [3.5], [1.5, 1.5]] == found["advantages"]
    assert [[1.0, 1.0], [0.0] * 3, [4.0], [2.0, 2.0]] == found["returns"]


def test_the_greedy_runs_reward_is_the_baseline_of_its_group_and_is_not_trained_on() -> None:
    batch = scored((1.0, 0.0, 4.0, 3.0), rollout=(0, 1, 0, 1), greedy_rollout=(1, 1, 1, 1))
    metrics, found = batch.estimate(estimated("remax"))
    assert [[1.0, 1.0], [1.0]] == found["advantages"], "1 less 0, and 4 less 3"
    assert 2.5 == metrics["reward/mean"]


def test_an_experts_rows_are_marked_and_left_out_of_every_statistic() -> None:
    batch = scored((1.0, 0.0, 99.0, 99.0), expert=(False, False, True, True))
    batch.columns["old_log_probs"] = jagged([[-1.0] * size for size in SIZES])
    algorithm = ResolvedAlgorithm(
        loss="ppo",
        advantages="reinforce_plus_plus",
        correction=Correction(),
        old_log_probs="old_log_probs",
        loss_columns={name: name for name in ("expert_mask", "rewards")},
    )
    metrics, found = batch.estimate(algorithm)
    assert [False, False, True, True] == found["expert_mask"]
    assert ([[0.0], [0.0, 0.0]], [[1.0], [1.0, 1.0]]) == (found["advantages"][2:], found["rollout_weights"][2:])
    assert ([1.0, 0.0, 0.0, 0.0], 0.5) == (found["rewards"], metrics["reward/mean"])
    alone, _ = advantages(
        "reinforce_plus_plus",
        token_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        response_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
    )
    assert alone[0, :2].tolist() == pytest.approx(found["advantages"][0])


def test_weights_are_of_the_engines_log_probs_over_the_servers_and_0_where_rejected() -> None:
    batch = scored()
    old = [[-1.0, -0.9], [-1.0, -4.0, -1.0], [-0.5], [-1.2, -1.0]]
    batch.columns["old_log_probs"] = jagged(old)
    correction = Correction(upper=1.5, reject="token", reject_low=0.2)
    algorithm = estimated("grpo", correction=correction, old_log_probs="old_log_probs")
    metrics, found = batch.estimate(algorithm)
    wanted = [[1.0, 2.718281828**0.1], [1.0, 0.0, 1.0], [1.5], [2.718281828**-0.2, 1.0]]
    assert [value for row in wanted for value in row] == pytest.approx(
        [value for row in found["rollout_weights"] for value in row], rel=1e-5
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]])
    dense = torch.zeros(4, 3)
    for row, values in enumerate(old):
        dense[row, : len(values)] = torch.tensor(values)
    expected = correction.weights(dense, -torch.ones(4, 3), mask)[2]
    assert {f"correction/{name}": pytest.approx(float(value)) for name, value in expected.items()} == {
        name: value for name, value in metrics.items() if name.startswith("correction/")
    }


def test_several_rewards() -> None:
    batch = scored()
    batch.columns["reward_dimensions"] = jagged([[1.0, 0.0], [0.0, 3.0], [5.0, 1.0], [6.0, 0.0]])
    _, found = batch.estimate(estimated("gdpo", advantages_options={"weights": [1.0, 0.0]}))
    assert [1, -1, -1, 1] == [round(row[0] / abs(row[0])) for row in found["advantages"]]


def test_a_runs_steps_and_states_are_told_apart_by_tags_and_prompts() -> None:
    """Two rollouts of one task have two steps each, and their second steps start in the same state."""
    batch = scored((0.0, 1.0, 0.0, 3.0), groups=("a",) * 4, rollout=(0, 0, 1, 1), step_id=(0, 1, 0, 1))
    batch.columns["prompt_ids"] = column_from_rows([torch.tensor(row) for row in ([1], [7, 7], [2], [7, 7])])
    plain = {"normalize_by_std": False}
    _, by_run = batch.estimate(estimated("step_wise_grpo", advantages_options=plain))
    assert [-1.0, -1.0, 1.0, 1.0] == [row[0] for row in by_run["advantages"]]
    _, by_state = batch.estimate(estimated("gigpo", advantages_options={**plain, "gamma": 1.0}))
    assert [-1.0, -2.0, 1.0, 2.0] == [row[0] for row in by_state["advantages"]]


def test_prepare_writes_what_the_loss_has_to_know_of_its_whole_batch() -> None:
    """DPO's margin is computed for each pair, whose first sample is the better one."""
    batch = Batch(groups=("p", "p", "q", "q"))
    batch.columns |= {
        "log_probs": jagged([[-1.0] * 2, [-2.0] * 3, [-1.0], [-0.5] * 2]),
        "ref_log_probs": jagged([[-1.5] * 2, [-2.0] * 3, [-1.0], [-1.0] * 2]),
    }
    columns = {name: name for name in ("log_probs", "ref_log_probs")}
    found = batch.prepare(ResolvedAlgorithm(loss="dpo", loss_options={"beta": 0.5}, prepared_columns=columns))
    assert [1.0, -1.0, 1.0, -1.0] == found["dpo_signs"]
    assert [0.5, 0.5, -0.5, -0.5] == pytest.approx(found["dpo_margins"])


def test_a_value_that_is_not_finite_is_named_with_its_sample() -> None:
    batch = scored()
    batch.columns["values"] = jagged([[0.5] * 2, [0.5, float("nan"), 0.5], [0.5], [0.5] * 2])
    with pytest.raises(ConfigError) as caught:
        batch.estimate(estimated("gae"))
    assert "sample train/0/0/0/1/0, response token 1" == caught.value.where


def test_a_rollout_weighs_the_same_however_many_sequences_it_has() -> None:
    """The first two rows are one rollout's; advantages themselves are those of the estimator."""
    batch = {"groups": ("a",) * 4, "rollout": (0, 0, 1, 2)}
    _, plain = scored(**batch).estimate(estimated("dr_grpo"))
    _, shared = scored(**batch).estimate(estimated("dr_grpo", sequence_weight="rollout"))
    weights = (0.5, 0.5, 1.0, 1.0)
    expected = [[value * weight for value in row] for row, weight in zip(plain["advantages"], weights, strict=True)]
    assert expected == shared["advantages"]
    assert plain["returns"] == shared["returns"]

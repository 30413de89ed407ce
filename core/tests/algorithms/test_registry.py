"""The registry, the named algorithms and the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from jackfield.abc.engine import TokenOutput
from jackfield.algorithms import (
    LossSpec,
    advantages,
    algorithm,
    names,
    part,
    policy_loss,
    prepare,
    register,
    registry,
    resolve_loss,
)
from jackfield.algorithms.settings import describe
from jackfield.cli import main
from jackfield_testing import refused

KINDS = ("algorithm", "advantages", "loss", "kl", "correction", "aggregation", "distillation", "shaping")
EVERYTHING = [(kind, name) for kind in KINDS for name in names(kind)]
#: What the trainer hands to a loss and to an estimator; bundles that want more have to say so.
TRAINER = {
    "token_rewards",
    "response_mask",
    "group_ids",
    "log_probs",
    "old_log_probs",
    "advantages",
    "global_tokens",
    "global_sequences",
}
COVERED = {
    "critic": {"values"},
    "expert_data": {"expert_mask"},
    "pairs": {"pair_ids"},
    "reference": {"ref_log_probs"},
}


@pytest.fixture
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))
    return


@pytest.mark.parametrize(("kind", "name"), EVERYTHING)
def test_every_part_says_what_it_is(kind: str, name: str) -> None:
    chosen = part(kind, name)
    assert chosen.text[0]
    assert chosen.scope in ("token", "sequence", "group", "batch")
    assert set(chosen.batch_options) <= set(chosen.options)
    assert set(chosen.whole_batch) <= set(chosen.inputs)
    json.dumps(describe(chosen))


@pytest.mark.parametrize("name", names("algorithm"))
def test_a_bundle_is_made_of_what_there_is_and_says_what_it_needs(name: str) -> None:
    bundle = algorithm(name)
    for chosen, options in zip(bundle.parts, (bundle.loss_options, {}, bundle.advantages_options), strict=False):
        assert set(options) <= set(chosen.options)
        covered = TRAINER.union(*(COVERED.get(need, {need}) for need in bundle.needs))
        assert set(chosen.needs) <= {*covered, "kept", "mask", "length_norm"}, (name, chosen.name)
    columns = {key for key in part("loss", bundle.loss).whole_batch if not key.startswith("global_")}
    if columns and name != "opmd_kimi":  # whose advantages hold what would be precomputed
        assert "prepare" in bundle.needs


def test_the_names_that_configurations_use_are_there() -> None:
    bundles = "ppo grpo dr_grpo dapo rloo reinforce_plus_plus gspo cispo opmd opmd_kimi opmd_pairwise mix sft dpo"
    assert set(bundles.split()) <= set(names("algorithm"))
    losses = "ppo gspo cispo sapo gpg opmd opmd_kimi opmd_pairwise sft dpo mix"
    assert set(losses.split()) <= set(names("loss"))
    assert {"grpo", "dr_grpo", "rloo", "opo", "gae", "reinforce_plus_plus"} <= set(names("advantages"))
    assert {"k1", "k2", "k3", "abs"} <= set(names("kl"))
    defaults = {
        ("loss", "ppo"): {"clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0},
        ("loss", "sapo"): {"tau_pos": 1.0, "tau_neg": 1.05},
        ("loss", "opmd"): {"tau": 1.0},
        ("loss", "mix"): {"mu": 0.1},
        ("advantages", "gae"): {"whiten": False},
    }
    for (kind, name), options in defaults.items():
        assert options == {key: part(kind, name).options[key] for key in options}
    assert part("advantages", "grpo").options["eps"] <= 1e-6


@pytest.mark.usefixtures("clean_registry")
def test_parts_of_ones_own() -> None:
    """With keyword-only inputs, options, and by the plugins' hook."""

    @register("advantages", "mine", "sequence")
    def mine(*, token_rewards, response_mask, group_ids=None, values=None, factor=2.0):  # type: ignore[no-untyped-def]
        """Rewards times a factor."""
        assert values is None
        return token_rewards * factor, token_rewards

    inputs = {"token_rewards": torch.ones(2, 1), "response_mask": torch.ones(2, 1)}
    assert [[3.0], [3.0]] == advantages("mine", **inputs, factor=3.0)[0].tolist()
    assert ({"factor": 2.0}, ("token_rewards", "response_mask")) == (
        part("advantages", "mine").options,
        part("advantages", "mine").needs,
    )

    def loss(**inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Takes whatever there is."""
        return inputs["log_probs"] * inputs["mine"], {}

    register("loss", "mine")(loss)
    assert "batch" == part("loss", "mine").scope
    found, _ = policy_loss(
        "mine",
        log_probs=torch.full((2, 1), 2.0),
        response_mask=torch.ones(2, 1),
        global_tokens=2,
        global_sequences=2,
        mine=4.0,
    )
    assert 8.0 == float(found)
    with refused("config.invalid-value"):
        register("kl", "k1")(loss)


@pytest.mark.usefixtures("clean_registry")
def test_a_loss_of_ones_own_that_needs_its_whole_batch() -> None:
    """Its column is computed if the call has the whole batch, and required if an engine runs a part of it."""

    @register("preparation", "centred", "batch")
    def center(advantages: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"centre": advantages.mean().expand(len(advantages))}

    @register("loss", "centred", "batch", whole_batch=("centre",))
    def centred(log_probs: torch.Tensor, advantages: torch.Tensor, centre: torch.Tensor) -> Any:
        """-(A - mean(A)) log pi. [Nowhere, 2026]

        Differs: in nothing.
        """
        return -(advantages - centre.unsqueeze(-1)) * log_probs, {}

    one = part("loss", "centred")
    assert ("-(A - mean(A)) log pi.", "Nowhere, 2026", "in nothing.") == one.text
    assert ("log_probs", "advantages") == one.needs
    rows = {"log_probs": torch.full((2, 1), -1.0), "advantages": torch.tensor([[1.0], [4.0]])}
    counts = {"global_tokens": 2, "global_sequences": 2}
    mask = torch.ones(2, 1)
    whole, _ = policy_loss("centred", **rows, response_mask=mask, **counts)
    columns = prepare("centred", **rows, response_mask=mask)
    assert [2.5, 2.5] == columns["centre"].tolist()
    function = resolve_loss(LossSpec(name="centred", options={}, global_counts=counts))
    data = {**rows, **columns, "response_mask": mask}
    shares = [
        function(TokenOutput(log_probs=rows["log_probs"][row]), {key: value[row] for key, value in data.items()})[0]
        for row in (slice(0, 1), slice(1, 2))
    ]
    assert float(whole) == pytest.approx(float(sum(shares)))
    with refused("algorithm.input", "centre"):
        function(TokenOutput(log_probs=rows["log_probs"]), {**rows, "response_mask": mask})


def test_list_shows_every_name() -> None:
    result = CliRunner().invoke(main, ["algorithms", "list"])
    assert 0 == result.exit_code
    for _, name in EVERYTHING:
        assert f"  {name} " in result.output
    result = CliRunner().invoke(main, ["algorithms", "list", "--kind", "kl", "--json"])
    assert list(names("kl")) == [one["name"] for one in json.loads(result.output)]


def test_show_tells_equation_paper_defaults_and_needs() -> None:
    result = CliRunner().invoke(main, ["algorithms", "show", "dpo", "--kind", "loss"])
    assert 0 == result.exit_code
    (shown,) = yaml.safe_load(result.output)
    assert "log sigmoid(z)" in shown["equation"]
    assert "arXiv:2305.18290" in shown["paper"]
    assert 0.1 == shown["options"]["beta"]
    assert ["ref_log_probs"] == shown["needs"]
    assert "dpo_margins" in shown["precomputed"]
    result = CliRunner().invoke(main, ["algorithms", "show", "grpo", "--json"])
    assert ["algorithm", "advantages"] == [one["kind"] for one in json.loads(result.output)]


def test_show_of_an_unknown_name_suggests_one() -> None:
    result = CliRunner().invoke(main, ["algorithms", "show", "gspoo"])
    assert 1 == result.exit_code
    assert "did you mean 'gspo'?" in result.output
    result = CliRunner().invoke(main, ["algorithms", "show", "gspoo", "--json"])
    assert "algorithm.unknown" == json.loads(result.output)["error"]["code"]

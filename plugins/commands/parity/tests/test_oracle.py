"""The oracle: engines and servers pass, and one that is wrong is caught at what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from jackfield.abc.engine import ModelSpec, OptimizerSpec
from jackfield.errors import JackfieldError
from jackfield_parity.batch import LossSettings, Settings, near, random_rows
from jackfield_parity.oracle import LENGTHS, Oracle, Report, Request
from jackfield_parity.reference import Reference, tiny_model

#: Engines of the table: one, two and four ranks, packed and padded, offloaded, with an adapter, rows and layers split.
ENGINES = (
    "fsdp",
    "fsdp@2",
    "fsdp:wrap=layers,cluster.micro_batch_tokens=24@4",
    "fsdp:cluster.offload=true,model.gradient_checkpointing=true",
    "fsdp:model.lora.rank=4@2",
    "fsdp:packing=false",
    "fsdp:sequence_parallel=2@2",
    "fsdp:tensor_parallel=2@2",
)
SERVER = "transformers"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report on all :data:`ENGINES` and on a server, with all parts of the loss."""
    loss = ("aggregation=seq-mean-token-mean", "kl_coefficient=0.1", "entropy_coefficient=0.05", "clip_dual=1.5")
    request = Request(engines=ENGINES, servers=(SERVER,), loss=loss, with_trl=False)
    return Oracle(request, tmp_path_factory.mktemp("dense")).run()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", ENGINES)
def test_an_engine_equals_the_reference(dense: Report, text: str) -> None:
    assert {} == dense.errors
    own = {line.measure: line for line in dense.lines if line.subject == text}
    wanted = {"weights", "log_probs", "log_probs (training)", "loss", "grad_norm", "gradients", "parameters"}
    wanted |= {f"log_probs of {SERVER}'s tokens", f"log_probs of {SERVER} beside this"}
    assert wanted == own.keys()
    assert [] == [line for line in own.values() if not line.ok]
    assert own["gradients"].by_name.keys() <= own["parameters"].by_name.keys()


@pytest.mark.timeout(300)
def test_a_server_equals_the_reference(dense: Report) -> None:
    (line,) = [line for line in dense.lines if line.subject == SERVER]
    assert line.ok


@pytest.mark.timeout(300)
def test_a_mixture_has_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    report = Oracle(Request(engines=("fsdp@2",), model="tiny-moe", with_trl=False), tmp_path).run()
    assert (True, {}) == (report.ok, report.errors)
    (line,) = [line for line in report.lines if line.measure == "parameters"]
    assert any("experts.3.down_proj.weight" in name for name in line.by_name)


MUTANTS = {
    "nothing": set[str](),
    "log_probs": {"log_probs", "log_probs (training)"},
    "loss": {"loss", "grad_norm", "gradients"},
    "gradients": {"gradients"},
    "grad_norm": {"grad_norm"},
    "weights": {"weights", "parameters"},
    "names": {"weights", "parameters"},
    "parameters": {"parameters"},
}


@pytest.mark.timeout(300)
def test_a_wrong_engine_is_caught_at_what_is_wrong(mutant: None, parity: Callable[..., Any]) -> None:
    engines = [f"mutant:wrong={wrong}" for wrong in (*MUTANTS, "dies")]
    result = parity(*engines, "--no-trl", "--json")
    assert 1 == result.exit_code
    found = json.loads(result.stdout)
    assert {"mutant:wrong=dies": "worker.died"} == {name: error["code"] for name, error in found["errors"].items()}
    for wrong, measures in MUTANTS.items():
        own = [line for line in found["comparisons"] if line["subject"] == f"mutant:wrong={wrong}"]
        beyond = {line["measure"] for line in own if not line["ok"]}
        assert (wrong, True) == (wrong, measures <= beyond if wrong == "loss" else measures == beyond), beyond
    (line,) = [line for line in found["comparisons"] if line["subject"].endswith("=gradients") and not line["ok"]]
    assert "model.layers.1.mlp.down_proj.weight" == line["where"]


def reference_of(folder: Path, loss: LossSettings) -> tuple[Reference, Any]:
    """A reference and a batch."""
    tiny_model(folder, "tiny")
    reference = Reference(ModelSpec(path=str(folder)))
    rows = random_rows(128, LENGTHS[:4])
    return reference, near(attrs.evolve(rows, settings=Settings(loss=loss)), reference.log_probs(rows))


def test_the_reference_computes_in_float64(tmp_path: Path) -> None:
    """Its gradient is the central difference to eight digits, which float32 inside of the model would not allow."""
    loss = LossSettings(kl_coefficient=0.1, entropy_coefficient=0.1)
    reference, batch = reference_of(tmp_path / "model", loss)
    model, step = reference._model, 1e-5
    named = {name: one for name, one in model.named_parameters() if "layers.0" in name}
    draw = torch.Generator().manual_seed(1)
    ways = {name: torch.randn(one.shape, generator=draw, dtype=torch.float64) for name, one in named.items()}
    reference.loss(batch).backward()
    slope = sum(float((one.grad * ways[name]).sum()) for name, one in named.items())
    values = []
    for factor in (1.0, -1.0):
        with torch.no_grad():
            for name, one in named.items():
                one += factor * step * ways[name]
            values.append(float(reference.loss(batch)))
            for name, one in named.items():
                one -= factor * step * ways[name]
    assert abs(slope - (values[0] - values[1]) / (2 * step)) < 1e-6 * abs(slope)


def test_training_changes_with_the_optimizer(tmp_path: Path) -> None:
    """The reference honours the settings that it accepts."""
    found = []
    for changes in ({}, {"no_decay": ("norms",)}, {"lr_factors": {"embed": 0.5}}, {"clip_grad": 1e-3}):
        reference, batch = reference_of(tmp_path / str(len(found)), LossSettings())
        spec = OptimizerSpec(lr=1e-2, weight_decay=0.5, **changes)
        found.append(reference.train(batch, spec, 1, {}).parameters)
    plain, undecayed, slowed, clipped = found
    norm, embeddings, other = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
    assert [False, True] == [torch.equal(plain[name], undecayed[name]) for name in (norm, other)]
    assert [False, True] == [torch.equal(plain[name], slowed[name]) for name in (embeddings, other)]
    assert not torch.equal(plain[other], clipped[other])


@pytest.mark.parametrize(
    ("engine", "code"),
    [
        ("fsdb", "plugin.not-found"),
        ("fsdp:wrap", "config.invalid-value"),
        ("fsdp:wrap=leaves", "config.invalid-value"),
        ("fsdp:warp=root", "config.unknown-key"),
        ("fsdp@0", "config.invalid-value"),
        ("fsdp:model.lora.rank=0", "config.invalid-value"),
        ("fsdp:model.dropout=0.1", "config.invalid-value"),
        ("fsdp:optimizer.name=muon", "config.invalid-value"),
        ("fsdp:cluster.devise=cpu", "config.unknown-key"),
        ("fsdp:precision=int8", "config.invalid-value"),
        ("fsdp:env.python=/nowhere/python", "plugin.interpreter"),
    ],
)
def test_an_engine_that_is_not_understood_is_refused(engine: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(JackfieldError) as refused:
        Oracle(Request(engines=(engine,)), tmp_path)
    assert code == refused.value.code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        pytest.param({"model": "nowhere"}, "engine.model", id="model"),
        pytest.param({"tolerances": ("speed=1",)}, "config.invalid-value", id="measure"),
        pytest.param({"tolerances": ("loss=low",)}, "config.invalid-value", id="tolerance"),
        pytest.param({"loss": ("clip=1",)}, "config.unknown-key", id="loss"),
        pytest.param({"engines": ("fsdp", "fsdp")}, "config.invalid-value", id="twice"),
    ],
)
def test_other_arguments_are_refused(changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    with pytest.raises(JackfieldError) as refused:
        Oracle(Request(**changes), tmp_path)
    assert code == refused.value.code

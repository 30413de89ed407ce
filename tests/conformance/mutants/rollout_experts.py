"""A small correct rollout server that returns the experts of a mixture, and its mutants."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from jackfield.abc.rollout import GenerateResult
from mutants.harness import mutant
from mutants.rollout_images import SeeingServer
from mutants.rollout_server import Job

_CAPABILITIES = {"router_replay": "full", "multi_modal": "full"}


@functools.cache
def _library(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


class MixtureModel:
    """What the reference needs of a model, and the experts of tokens."""

    def __init__(self, folder: str) -> None:
        self._model = _library(folder)
        self.settings = self._model.config
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, tokens: tuple[int, ...]) -> Tensor:
        logits: Tensor = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return logits.double()

    def experts(self, ids: list[int]) -> Any:
        found: list[Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda module, inputs, output: found.append(output[2]))
            for layer in self._model.model.layers
        ]
        self(tuple(ids))
        for hook in hooks:
            hook.remove()
        return torch.stack(found, dim=1).numpy().astype(np.int16)


class ReplayingServer(SeeingServer):
    """A correct server, of mixtures of experts, too."""

    def open_model(self) -> Any:
        description = json.loads((Path(self.context.model.path) / "config.json").read_text(encoding="utf-8"))
        mixes = "moe" in description["model_type"]
        return MixtureModel(self.context.model.path) if mixes else super().open_model()

    def result(self, job: Job) -> GenerateResult:
        result = super().result(job)
        return attrs.evolve(result, routed_experts=self.experts(job)) if self.asked() else result

    def asked(self) -> bool:
        return self.context.model.router_replay

    def ids(self, job: Job) -> list[int]:
        return [*job.request.prompt_ids, *job.tokens][:-1]

    def experts(self, job: Job) -> Any:
        return self.model.experts(self.ids(job))


class KnowsTheResponse(ReplayingServer):
    def experts(self, job: Job) -> Any:
        return super().experts(job)[len(job.request.prompt_ids) :]


class KnowsNone(ReplayingServer):
    def asked(self) -> bool:
        return False


class ShiftsLayers(ReplayingServer):
    def experts(self, job: Job) -> Any:
        return super().experts(job)[:, ::-1].copy()


class AlwaysTells(ReplayingServer):
    def asked(self) -> bool:
        return isinstance(self.model, MixtureModel)


MUTANTS = [
    mutant("rollout", KnowsTheResponse, "the prompt has no experts", "120", capabilities=_CAPABILITIES),
    mutant("rollout", KnowsNone, "results have no experts", "120", capabilities=_CAPABILITIES),
    mutant("rollout", ShiftsLayers, "layers are in the reverse order", "120", capabilities=_CAPABILITIES),
    mutant("rollout", AlwaysTells, "experts are returned that were not asked for", "121", capabilities=_CAPABILITIES),
]

"""A small correct rollout server that takes images, and its mutants."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from jackfield.abc.rollout import GenerateRequest, RolloutContext
from mutants.harness import mutant
from mutants.rollout_server import Job, ReferenceServer

_CAPABILITIES = {"multi_modal": "full"}
_PLACES = 4


@functools.cache
def _library(folder: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()


class SeeingModel:
    """What the reference needs of a model, and its logits with an image."""

    def __init__(self, folder: str) -> None:
        self._model = _library(folder)
        self.settings = self._model.config.text_config
        self.placeholder = self._model.config.image_token_id
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...], prompt: int, inputs: Mapping[str, Any]) -> Tensor:
        """Logits of the next token, float64 ``[V]``. Only the places of the prompt are those of an image."""
        ids = torch.tensor([tokens])
        embeddings = self._model.get_input_embeddings()(ids)
        if inputs:
            pixels = torch.from_numpy(inputs["pixel_values"].copy())
            features = torch.cat(list(self._model.get_image_features(pixel_values=pixels).pooler_output))
            places = [place for place, token in enumerate(tokens[:prompt]) if token == self.placeholder]
            embeddings[0, places[: len(features)]] = features
        logits: Tensor = self._model(inputs_embeds=embeddings, use_cache=False).logits[0, -1]
        return logits.double()


class SeeingServer(ReferenceServer):
    """A correct server, of models with a vision tower, too."""

    def open_model(self) -> Any:
        try:
            return SeeingModel(self.context.model.path)
        except (ValueError, AttributeError):
            return super().open_model()

    def check(self, request: GenerateRequest) -> None:
        super().check(attrs.evolve(request, multi_modal_data={}))
        given = request.multi_modal_data
        if not given:
            return
        sees = isinstance(self.model, SeeingModel) and set(given) == {"pixel_values"}
        if not sees or request.prompt_ids.count(self.model.placeholder) < _PLACES * len(given["pixel_values"]):
            self.refuse(request.request_id, "images that do not fit")

    def images(self, job: Job) -> Mapping[str, Any]:
        return job.request.multi_modal_data

    def logits(self, job: Job) -> Tensor:
        if not isinstance(self.model, SeeingModel):
            return super().logits(job)
        prompt = self.prompt(job.request)
        return self.model.logits((*prompt, *job.tokens), len(prompt), self.images(job))


class SeesNothing(SeeingServer):
    def images(self, job: Job) -> Mapping[str, Any]:
        return {}


class RemembersByTokens(SeeingServer):
    def __init__(self, config: Any, context: RolloutContext) -> None:
        super().__init__(config, context)
        self.seen: dict[tuple[int, ...], Mapping[str, Any]] = {}

    def images(self, job: Job) -> Mapping[str, Any]:
        return self.seen.setdefault(job.request.prompt_ids, job.request.multi_modal_data)


class ForgetsAfterTheFirstToken(SeeingServer):
    def images(self, job: Job) -> Mapping[str, Any]:
        return {} if job.tokens else super().images(job)


class SeesAtTheEnd(SeeingServer):
    """The rest of a request has tokens behind the text."""

    def images(self, job: Job) -> Mapping[str, Any]:
        return super().images(job) if job.request.prompt_ids[-1] == 7 else {}


class TakesAnyImages(SeeingServer):
    def submit(self, request: GenerateRequest) -> Job:
        fits = request.prompt_ids.count(63) >= _PLACES and "pixel_values" in request.multi_modal_data
        return super().submit(request if fits else attrs.evolve(request, multi_modal_data={}))


MUTANTS = [
    mutant("rollout", SeesNothing, "images are taken and not used", "112 114", capabilities=_CAPABILITIES),
    mutant("rollout", RemembersByTokens, "images are remembered by the prompt", "112", capabilities=_CAPABILITIES),
    mutant(
        "rollout",
        ForgetsAfterTheFirstToken,
        "the second token is drawn without the image",
        "112 113 114",
        capabilities=_CAPABILITIES,
    ),
    mutant("rollout", SeesAtTheEnd, "the rest of a request loses its image", "113", capabilities=_CAPABILITIES),
    mutant("rollout", TakesAnyImages, "images that do not fit are left out", "114", capabilities=_CAPABILITIES),
]

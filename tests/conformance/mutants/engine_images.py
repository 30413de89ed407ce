"""A small correct training engine that takes images, and its mutants."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForImageTextToText

from jackfield.abc.engine import TokenOutput
from jackfield.sdk.arrays import unpack
from jackfield.sdk.jagged import rows as split_rows
from mutants.engine_register import mutant
from mutants.plain_engine import Micro, PlainEngine


@functools.cache
def _library(folder: str) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).eval()


class SeeingEngine(PlainEngine):
    """Each row's images, in the order of a micro-batch's rows."""

    inputs: list[Mapping[str, Any]]

    def load(self) -> None:
        if "images" not in self.context.model.path:
            super().load()
            return
        self.model = _library(self.context.model.path)

    def close(self) -> None:
        if "images" in self.context.model.path:
            self.model = None
        super().close()

    def plan(self, data: TensorDict) -> list[Micro]:
        self.inputs = []
        if "multi_modal_inputs" in data.keys():  # noqa: SIM118, it is not a mapping
            self.inputs = [unpack(row.numpy().tobytes()) for row in split_rows(data["multi_modal_inputs"])]
            data = data.exclude("multi_modal_inputs")
        return super().plan(data)

    def pixels(self, micro: Micro) -> list[Any]:
        return [self.inputs[row]["pixel_values"] for row in micro.rows if self.inputs and self.inputs[row]]

    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        pixels = self.pixels(micro)
        if not pixels:
            return super().forward(micro, want_entropy)
        given = torch.cat([torch.from_numpy(each.copy()) for each in pixels])
        model = self.model
        self.model = functools.partial(model, pixel_values=given)
        try:
            return super().forward(micro, want_entropy)
        finally:
            self.model = model


class TrainsBlind(SeeingEngine):
    def pixels(self, micro: Micro) -> list[Any]:
        return []


class SharesTheFirstImage(SeeingEngine):
    def pixels(self, micro: Micro) -> list[Any]:
        found = super().pixels(micro)
        return found[:1] * len(found)


class ImagesInTheOrderOfTheBatch(SeeingEngine):
    def pixels(self, micro: Micro) -> list[Any]:
        return super().pixels(micro)[::-1]


MUTANTS = [
    mutant(TrainsBlind, "images do not reach the model", "122", only=("multi_modal",)),
    mutant(SharesTheFirstImage, "rows with equal prompts share an image", "122", only=("multi_modal",)),
    mutant(ImagesInTheOrderOfTheBatch, "images are in another order than the rows", "122", only=("multi_modal",)),
]

"""For the suite of rollout servers: a tiny vision-language model, images for it, and its log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from jackfield.abc.rollout import GenerateRequest, GenerateResult
from jackfield_conformance.support.expecting import temporary_root
from jackfield_conformance.support.rollout import greedy
from jackfield_conformance.support.rollout_model import END, VOCABULARY

PLACEHOLDER, PLACES, SIDE = 63, 4, 16  #: the token of an image's places, how many there are, and its pixels
TOLERANCE = 1e-3  #: of log-probabilities, in float32


@functools.cache
def _model() -> Any:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3Config

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = CLIPVisionConfig(image_size=SIDE, patch_size=SIDE // 2, num_attention_heads=4, projection_dim=32, **sizes)
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
        **sizes,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=PLACEHOLDER, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config)
        for parameter in model.parameters():  # as the library makes them, all images look alike
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.25)
    return model.eval().requires_grad_(False)


@functools.cache
def seeing_folder() -> str:
    """Write a LLaVA of a CLIP tower and a Qwen3, in float32, once per process."""
    folder = str(temporary_root() / "rollout-model-images")
    _model().save_pretrained(folder)
    return folder


def seeing(name: str, count: int, seed: int) -> GenerateRequest:
    """Make a greedy request with an image, which differs by seed, before a text."""
    import numpy as np

    pixels = np.random.default_rng(seed).normal(size=(1, 3, SIDE, SIDE)).astype(np.float32)
    sent = greedy(name, count, (5, *[PLACEHOLDER] * PLACES, 6, 7))
    return attrs.evolve(sent, multi_modal_data={"pixel_values": pixels})


def expected_log_probs(sent: GenerateRequest, result: GenerateResult) -> list[float]:
    """Return the log-probabilities of a result's tokens by one pass of the library.

    A placeholder that was generated ends them: the library would take it for a place of an image.
    """
    made = list(result.token_ids)
    made = made[: made.index(PLACEHOLDER)] if PLACEHOLDER in made else made
    return log_probs_of(sent.prompt_ids, made, sent.multi_modal_data)


def log_probs_of(prompt: Sequence[int], response: Sequence[int], inputs: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of a response without placeholders by one pass of the library."""
    ids = torch.tensor([[*prompt, *response]])
    given = {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}
    logits = _model()(input_ids=ids, **given).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(list(response), dtype=torch.int64)[:, None])
    return [float(value) for value in chosen[:, 0]]

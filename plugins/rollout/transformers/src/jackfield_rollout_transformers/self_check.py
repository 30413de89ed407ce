"""The check that a server makes when it starts: its decode loop computes what plain passes of the library do."""

from __future__ import annotations

import attrs
import torch

from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import JackfieldError, RolloutError
from jackfield_huggingface.architectures import advice
from jackfield_rollout_transformers.decoder import Decoder, Sequence
from jackfield_rollout_transformers.model import LoadedModel, unusable

_NEW_TOKENS = 4
#: mean difference of log-probabilities that counts as rounding
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def check_requests(model: LoadedModel, rows: int) -> list[GenerateRequest]:
    """Return up to three requests of different lengths; none if the model's limit is too short."""
    length = min(5, model.max_model_len - _NEW_TOKENS)
    if length < 1:
        return []
    ids = tuple(1 + n * (model.vocabulary - 2) // length for n in range(length))
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, seed=0, log_probs="raw", ignore_eos=True)
    prompts = [ids, ids[-1:], ids[:3]][:rows]
    requests = [
        GenerateRequest(request_id=f"check-{n}", prompt_ids=prompt, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]
    images = model.images
    if images is not None:  # an image before the last prompt
        seen, places = images.example()
        if len(places) + _NEW_TOKENS < model.max_model_len:
            prompt = (*places, requests[-1].prompt_ids[0])
            arrays = {name: each.numpy() for name, each in seen.items()}
            requests[-1] = attrs.evolve(requests[-1], multi_modal_data=arrays, prompt_ids=prompt)
    return requests


def check_decoding(model: LoadedModel, decoder: Decoder, sequences: list[Sequence]) -> None:
    """Compare ``sequences`` (two together, then one joins) with plain passes; ``engine.model`` if they differ."""
    path = str(model.module.config.name_or_path)
    try:
        for joiners in (sequences[:2], sequences[2:]):
            if joiners:
                decoder.run(joiners, 2, bool)
        while decoder.running:
            decoder.run([], 1, bool)
        failed = [sequence.error for sequence in sequences if sequence.error is not None]
        if failed:
            raise failed[0]
        differences = [_difference(model, sequence) for sequence in sequences]
    except JackfieldError:
        raise
    except Exception as error:
        raise RolloutError(
            f"the model in {path} fails in this server's decode loop: {type(error).__name__}: {error}",
            code="engine.model",
            where=path,
            fix=advice(path, "served"),
        ) from error
    decoder.release()
    bound = _ROUNDING[model.module.dtype]
    if not all(difference <= bound for difference in differences):
        raise unusable(
            path,
            f"log-probabilities in the decode loop within {bound} of a plain forward pass",
            f"{type(model.module).__name__}: they differ by {max(differences):.3g} on average",
            unsupported=True,
        )


@torch.inference_mode()
def _difference(model: LoadedModel, sequence: Sequence) -> float:
    """Return the mean absolute difference of raw log-probabilities from those of one forward pass."""
    first = len(sequence.request.prompt_ids)
    ids = torch.tensor([sequence.context], device=model.device)
    seen = {"input_ids": ids}
    if sequence.images is not None:
        assert model.images is not None, "a model without them is asked for none"
        seen = model.images.library(model.module, ids, sequence.images)
    logits = model.module(use_cache=False, **seen).logits[0, first - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
    return float((expected.cpu() - torch.tensor(sequence.log_probs)).abs().mean())

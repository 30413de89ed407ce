"""A little generation at start, compared with a plain forward pass.

Architectures are many, and some do with positions, masks and caches what this server's decode loop does not expect.
They are refused before the first sample rather than served with wrong log-probabilities.
"""

from __future__ import annotations

import torch

from jackfield.abc.rollout import GenerateRequest, SamplingParams
from jackfield.errors import JackfieldError, RolloutError
from jackfield_rollout_transformers.decoder import Decoder
from jackfield_rollout_transformers.model import LoadedModel, unusable
from jackfield_rollout_transformers.sequence import Sequence

_NEW_TOKENS = 4
#: mean difference of log-probabilities that passes for rounding
_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def check_requests(model: LoadedModel, rows: int) -> list[GenerateRequest]:
    """Up to three requests of different lengths; none where the model is too short for them."""
    length = min(5, model.max_model_len - _NEW_TOKENS)
    if length < 1:
        return []
    ids = tuple(1 + n * (model.vocabulary - 2) // length for n in range(length))
    sampling = SamplingParams(max_new_tokens=_NEW_TOKENS, seed=0, log_probs="raw", ignore_eos=True)
    prompts = [ids, ids[-1:], ids[:3]][:rows]
    return [
        GenerateRequest(request_id=f"check-{n}", prompt_ids=prompt, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]


def check_decoding(model: LoadedModel, decoder: Decoder, sequences: list[Sequence]) -> None:
    """Generate ``sequences``, the first two together, another joining them, and compare.

    Raises:
        RolloutError: ``engine.model``: the decode loop does not fit this architecture.
    """
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
        ) from error
    decoder.release()
    bound = _ROUNDING[model.module.dtype]
    if not all(difference <= bound for difference in differences):
        raise unusable(
            path,
            f"log-probabilities in the decode loop within {bound} of a plain forward pass",
            f"{type(model.module).__name__}: they differ by {max(differences):.3g} on average",
        )


@torch.inference_mode()
def _difference(model: LoadedModel, sequence: Sequence) -> float:
    """Mean absolute difference of a sequence's raw log-probabilities from those of one forward pass."""
    first = len(sequence.request.prompt_ids)
    ids = torch.tensor([sequence.context], device=model.device)
    logits = model.module(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]
    return float((expected.cpu() - torch.tensor(sequence.log_probs)).abs().mean())

"""Checks of training engines: images beside tokens, on a tiny LLaVA that the suite makes."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from jackfield.sdk.arrays import pack
from jackfield.sdk.jagged import jagged
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import engine as support
from jackfield_conformance.support.rollout_images import TOLERANCE, log_probs_of, seeing, seeing_folder

_RESPONSES = ((8, 9, 10), (8, 9, 10), (11, 12, 13, 14, 15))


@check("ENG-122", capability="multi_modal", page="docs/plugins/engine.md#passes")
def images_reach_the_model(subject: Subject) -> None:
    """Rows with equal tokens and different images, and one without an image, have the model's log-probabilities,
    together and apart."""
    sent = [seeing("one", 1, 1), seeing("other", 1, 2)]
    prompts = [*(each.prompt_ids for each in sent), (5, 6, 7)]
    inputs = [*(dict(each.multi_modal_data) for each in sent), {}]
    columns = {
        "prompt_ids": jagged([torch.tensor(prompt) for prompt in prompts]),
        "response_ids": jagged([torch.tensor(response) for response in _RESPONSES]),
        "multi_modal_inputs": jagged([torch.frombuffer(bytearray(pack(each)), dtype=torch.uint8) for each in inputs]),
    }
    triples = zip(prompts, _RESPONSES, inputs, strict=True)
    wanted = [torch.tensor(log_probs_of(*each)) for each in triples]
    assert not torch.allclose(wanted[0], wanted[1]), "the suite's images look alike"
    for most in (1, 10_000):
        with support.opened(subject, Path(seeing_folder()), micro_batch_tokens=most) as engine:
            found = support.log_probs(engine, TensorDict(columns, batch_size=[len(prompts)]))
        for row, (one, other) in enumerate(zip(wanted, found, strict=True)):
            off = float((one - other).abs().max())
            assert off <= TOLERANCE, f"row {row}, micro_batch_tokens {most}: log-probabilities are {off:.3g} off"

"""TRL's training step for ``engines.py``: its ``GRPOTrainer`` on given rows, and its loss for the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def ratio_loss(tokens: int) -> Callable[..., Any]:
    """Return GRPO's loss for the engine: the mean over all tokens. The ratio is 1, as in TRL's first update."""
    import torch

    def loss(output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        ratio, advantages = (output.log_probs - output.log_probs.detach()).exp(), data["advantages"]
        terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -terms.sum() / tokens, {}

    return loss


def trl_step(folder: Path, batch: Any, micro_batch_rows: int) -> Callable[[], float]:
    """Return a step of TRL: micro-batches of so many rows through ``training_step``, clipping, and AdamW.

    The step returns the norm of the gradient, which an equal step of another side has, too: the loss of an on-policy
    step does not depend on the weights. Its batch is made once; generation, rewards, logging and the sampler are left
    out.
    """
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<end>",
    )
    micro_batches = _micro_batches(batch, micro_batch_rows)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=micro_batch_rows,
            gradient_accumulation_steps=len(micro_batches),
            num_generations=2,
            max_completion_length=int(micro_batches[0]["completion_ids"].shape[1]),
            loss_type="dapo",
            epsilon=0.2,
            beta=0.0,
            learning_rate=1e-6,
            weight_decay=0.01,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["<pad>"] * micro_batch_rows}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer._prepare_inputs = lambda inputs: inputs

    def step() -> float:
        trainer.optimizer.zero_grad()
        for each in micro_batches:
            trainer.training_step(trainer.model, each, None)
        norm = float(trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0))
        trainer.optimizer.step()
        return norm

    return step


def _micro_batches(batch: Any, size: int) -> list[dict[str, Any]]:
    """Return rows as TRL takes them: prompts padded on the left, completions on the right."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from jackfield.sdk.jagged import rows as rows_of

    prompts, responses, advantages = (rows_of(batch[name]) for name in ("prompt_ids", "response_ids", "advantages"))
    found = []
    for start in range(0, len(prompts), size):
        chosen = slice(start, start + size)
        found.append(
            {
                "prompt_ids": pad_sequence(prompts[chosen], batch_first=True, padding_side="left"),
                "prompt_mask": _mask(prompts[chosen], "left"),
                "completion_ids": pad_sequence(responses[chosen], batch_first=True),
                "completion_mask": _mask(responses[chosen], "right"),
                "advantages": pad_sequence(advantages[chosen], batch_first=True),
                "num_items_in_batch": torch.tensor(float(sum(map(len, responses)))),
            }
        )
    return found


def _mask(rows: list[Any], side: str) -> Any:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)

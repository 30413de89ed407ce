"""TRL's own GRPO loss on a batch: ``python trl_side.py PLAN.json``.

It runs where TRL is installed and imports no module of this package. It writes log-probs and gradients into
``trl.safetensors`` and the loss into ``trl.json``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

_LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}  #: TRL's names of our aggregations


def main(file: str) -> None:
    """Compute the loss of the batch with TRL's trainer, in float32."""
    import torch
    from safetensors.torch import save_file

    plan = json.loads(Path(file).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    folder = Path(plan["folder"])
    with tempfile.TemporaryDirectory(prefix="jackfield-parity-trl-") as temporary:
        trainer, inputs = prepare(plan, temporary)
        model = trainer.model
        value = trainer._compute_loss(model, inputs)
        value.backward()
        with torch.no_grad():
            ids, mask = (
                torch.cat([inputs[f"{of}_{n}"] for of in ("prompt", "completion")], 1) for n in ("ids", "mask")
            )
            width = inputs["completion_ids"].shape[1]
            log_probs = trainer._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
    found = {f"gradients/{name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    found["log_probs"] = log_probs[inputs["completion_mask"].bool()]
    save_file({name: one.contiguous() for name, one in found.items()}, folder / "trl.safetensors")
    content = {"loss": float(value.detach()), "version": version("trl")}
    (folder / "trl.json").write_text(json.dumps(content), encoding="utf-8")


def prepare(plan: Mapping[str, Any], folder: str) -> tuple[Any, dict[str, Any]]:
    """Return TRL's trainer and the inputs of its loss, padded ``[B, T]``.

    ``plan`` has ``batch`` (a file of :mod:`jackfield_parity.batch`), ``model_path``, ``loss``, ``temperature`` and,
    where they differ from the CPU and float32, ``device`` and ``bf16``.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    loss, tensors, device = plan["loss"], load_file(plan["batch"]), plan.get("device", "cpu")
    sizes = {name: tensors[f"{name}_lengths"].tolist() for name in ("prompt", "response")}
    rows = len(sizes["prompt"])

    def padded(name: str, side: str = "right") -> Any:
        values = list(tensors[name].split(sizes["prompt" if name == "prompt_ids" else "response"]))
        return pad_sequence(values, batch_first=True, padding_side=side).to(device)

    def present(name: str, side: str = "right") -> Any:
        ones = [torch.ones(size, dtype=torch.int64) for size in sizes[name]]
        return pad_sequence(ones, batch_first=True, padding_side=side).to(device)

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=rows,
        num_generations=rows,
        gradient_accumulation_steps=1,
        loss_type=_LOSS_TYPES[loss["aggregation"]],
        epsilon=loss["clip_low"],
        epsilon_high=loss["clip_high"],
        beta=loss["kl_coefficient"],
        temperature=plan["temperature"],
        use_bias_correction_kl=False,
        gradient_checkpointing=False,
        use_cpu=device == "cpu",
        bf16=plan.get("bf16", False),
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(plan["model_path"], dtype=torch.float32, local_files_only=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=_data(),
        processing_class=_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = {
        "prompt_ids": padded("prompt_ids", "left"),
        "prompt_mask": present("prompt", "left"),
        "completion_ids": padded("response_ids"),
        "completion_mask": present("response"),
        "tool_mask": padded("response_mask"),
        "advantages": padded("advantages"),
        "old_per_token_logps": padded("old_log_probs"),
        "num_items_in_batch": tensors["response_mask"].sum().to(device),
    }
    if loss["kl_coefficient"]:
        inputs["ref_per_token_logps"] = padded("ref_log_probs")
    return trainer, inputs


def _data() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["none"]})


def _tokenizer() -> Any:
    """Make a tokenizer, which the trainer asks for and the loss does not use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


if __name__ == "__main__":
    main(*sys.argv[1:])

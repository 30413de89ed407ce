"""The batch on which engines are compared, its settings, and its safetensors file.

B rows; the values of all rows are concatenated in one dimension, and ``*_lengths`` int64 ``[B]`` say how many values
each row has. ``docs/guides/parity.md`` documents the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs.validators import ge, gt, lt

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import DataError
from jackfield.settings import option, structure

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "jackfield-parity-1"
_OF_PROMPT, _OF_RESPONSE = ("prompt_ids",), ("response_ids", "response_mask", "advantages", "old_log_probs")
_OPTIONAL = ("ref_log_probs",)
_INTEGERS = ("prompt_ids", "response_ids")
#: Results of the framework that wrote the file, which are compared with the reference like those of an engine.
RESULTS = "result."


@attrs.frozen(kw_only=True)
class LossSettings:
    """PPO's clipped loss of GRPO, with optional penalties."""

    clip_low: float = option(0.2, "the ratio is clipped below 1 - clip_low", [ge(0.0), lt(1.0)])
    clip_high: float = option(0.2, "the ratio is clipped above 1 + clip_high", ge(0.0))
    clip_dual: float | None = option(None, "bound of the loss where advantages are negative; null: off", gt(1.0))
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = option(
        "token-mean", "how losses of tokens are averaged over the batch"
    )
    kl_coefficient: float = option(0.0, "weight of the KL estimate k3 to ref_log_probs", ge(0.0))
    entropy_coefficient: float = option(0.0, "weight of the entropy bonus", ge(0.0))


@attrs.frozen(kw_only=True)
class Settings:
    """What is computed on the batch. Keys of the file's metadata."""

    loss: LossSettings = option(factory=LossSettings, help="the loss")
    optimizer: OptimizerSpec = option(
        factory=lambda: OptimizerSpec(lr=1e-3, weight_decay=0.1), help="AdamW of the three steps"
    )
    temperature: float = option(1.0, "logits are divided by it", gt(0.0))


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Rows of different lengths; each list has a tensor ``[length]`` per row."""

    prompt_ids: list[Tensor]  #: int64
    response_ids: list[Tensor]  #: int64
    response_mask: list[Tensor]  #: float32, 1 where a token counts
    advantages: list[Tensor]  #: float32
    old_log_probs: list[Tensor]  #: float32
    ref_log_probs: list[Tensor] | None = None  #: float32
    settings: Settings = attrs.field(factory=Settings)
    framework: str = "jackfield"  #: that wrote the file
    results: Mapping[str, Tensor] = attrs.field(factory=dict)  #: of that framework, by name without ``result.``

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @property
    def counts(self) -> dict[str, int]:
        """The global counts that normalise the loss."""
        return {
            "global_tokens": int(sum(float(mask.sum()) for mask in self.response_mask)),
            "global_sequences": len(self),
        }

    def loss_spec(self) -> dict[str, Any]:
        """Return the loss as the fields of a :class:`jackfield.algorithms.LossSpec`."""
        loss = attrs.asdict(self.settings.loss)
        return {"name": "ppo", "options": {**loss, "kl": "k3"}, "global_counts": self.counts}


def write_batch(batch: Batch, file: Path) -> None:
    """Write a batch as a safetensors file."""
    from safetensors.torch import save_file

    save_file(_tensors(batch), file, {"format": FORMAT, "framework": batch.framework, "settings": _plain(batch)})


def _plain(batch: Batch) -> str:
    return json.dumps(attrs.asdict(batch.settings))


def _tensors(batch: Batch) -> dict[str, Tensor]:
    import torch

    found = {}
    for name in (*_OF_PROMPT, *_OF_RESPONSE, *_OPTIONAL):
        rows = getattr(batch, name)
        if rows is not None:
            found[name] = torch.cat(rows)
    for name in ("prompt", "response"):
        found[f"{name}_lengths"] = torch.tensor([len(row) for row in getattr(batch, f"{name}_ids")])
    return found | {f"{RESULTS}{name}": value.contiguous() for name, value in batch.results.items()}


def read_batch(file: Path) -> Batch:
    """Read a batch, or raise ``data.malformed`` with the tensor that is wrong."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
    except FileNotFoundError as error:
        raise _refusal(file, "there is no batch", "a safetensors file", "no file") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _refusal(file, "a batch cannot be read", "a safetensors file", error) from error
    if metadata.get("format") != FORMAT:
        raise _refusal(file, "the format of a batch is unknown", f"metadata format={FORMAT}", metadata.get("format"))
    try:
        plain = json.loads(metadata.get("settings", "{}"))
    except ValueError as error:
        raise _refusal(file, "the metadata 'settings' are no JSON", "a JSON object", error) from error
    settings = structure(Settings, plain, "settings", DataError)
    results = {n.removeprefix(RESULTS): tensors.pop(n) for n in list(tensors) if n.startswith(RESULTS)}
    rows = _rows(file, tensors)
    if settings.loss.kl_coefficient and "ref_log_probs" not in rows:
        raise _refusal(file, "the loss has a KL penalty", "the tensor ref_log_probs", "no such tensor")
    _check_results(file, results, rows)
    framework = metadata.get("framework", "another framework")
    return Batch(**rows, settings=settings, framework=framework, results=results)


def _rows(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    import torch

    needed = {*_OF_PROMPT, *_OF_RESPONSE, "prompt_lengths", "response_lengths"}
    if missing := sorted(needed - tensors.keys()):
        raise _refusal(file, "tensors of a batch are missing", ", ".join(sorted(needed)), f"no {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - needed - {*_OPTIONAL}):
        allowed = f"names with the prefix {RESULTS!r}, or {', '.join(sorted({*needed, *_OPTIONAL}))}"
        raise _refusal(file, "tensors of a batch are unknown", allowed, ", ".join(unknown))
    found: dict[str, Any] = {}
    for name in tensors.keys() - {"prompt_lengths", "response_lengths"}:
        lengths, tensor = tensors["prompt_lengths" if name in _OF_PROMPT else "response_lengths"], tensors[name]
        total = int(lengths.sum())
        if tensor.shape != (total,) or lengths.dim() != 1 or bool((lengths < 0).any()):
            raise _refusal(file, f"the tensor {name} does not fit the lengths", [total], list(tensor.shape))
        if name in _INTEGERS and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise _refusal(file, f"the tensor {name} has the wrong dtype", "int64", tensor.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise _refusal(file, f"the tensor {name} is not finite", "finite numbers", "NaN or infinity")
        values = tensor.long() if name in _INTEGERS else tensor.float()
        found[name] = list(values.split(lengths.tolist()))
    prompts, responses = tensors["prompt_lengths"], tensors["response_lengths"]
    if len(prompts) != len(responses) or not len(prompts) or bool((prompts < 1).any()):
        expected = "the same number of prompts and responses, of at least one token per prompt"
        raise _refusal(file, "prompts and responses do not fit", expected, f"{prompts.tolist()}, {responses.tolist()}")
    if not any(float(mask.sum()) for mask in found["response_mask"]):
        raise _refusal(file, "no token of the batch counts", "a response_mask with ones", "zeros")
    return found


def _check_results(file: Path, results: Mapping[str, Tensor], rows: Mapping[str, Any]) -> None:
    tokens = sum(len(row) for row in rows["response_ids"])
    for name, tensor in results.items():
        kind, _, of = name.partition(".")
        if kind == "log_probs" and not of:
            fits, expected = tensor.shape == (tokens,), f"[{tokens}]"
        elif kind == "loss" and not of:
            fits, expected = tensor.numel() == 1, "one number"
        else:
            fits, expected = kind in ("gradients", "parameters") and bool(of), "log_probs, loss, gradients.NAME, …"
        if not fits:
            raise _refusal(file, f"the result {name} is unknown or has the wrong shape", expected, list(tensor.shape))


def _refusal(file: Path, what: str, expected: object, found: object) -> DataError:
    fix = "write the file as docs/guides/parity.md says; `jackfield parity --write FILE` makes an example"
    return DataError(what, where=str(file), expected=expected, found=found, fix=fix)


def random_rows(vocabulary: int, lengths: Sequence[tuple[int, int]], seed: int = 7) -> Batch:
    """Make a batch of random tokens with these prompt and response lengths; ``old_log_probs`` are 0."""
    import torch

    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, vocabulary, (count,), generator=draw)

    sizes = [response for _, response in lengths]
    return Batch(
        prompt_ids=[tokens(prompt) for prompt, _ in lengths],
        response_ids=[tokens(size) for size in sizes],
        response_mask=[(torch.rand(size, generator=draw) < 0.9).float() for size in sizes],
        advantages=[torch.randn(1, generator=draw).expand(size).contiguous() for size in sizes],
        old_log_probs=[torch.zeros(size) for size in sizes],
    )


def near(batch: Batch, log_probs: Sequence[Tensor], seed: int = 9) -> Batch:
    """Return the batch with ``old_log_probs`` close to these, so that some ratios are clipped, and references."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    old = [(row + 0.15 * torch.randn(len(row), generator=draw)).float() for row in log_probs]
    ref = [(row + 0.1 * torch.randn(len(row), generator=draw)).float() for row in log_probs]
    return attrs.evolve(batch, old_log_probs=old, ref_log_probs=ref)

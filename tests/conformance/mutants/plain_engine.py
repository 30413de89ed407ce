"""The reference of training engines: plain PyTorch and transformers, in small steps that a mutant can replace."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import itertools
import json
import math
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from jackfield.abc.engine import (
    BaseEngine,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    LoadCheckpointResult,
    LossFunction,
    OptimizerSpec,
    SaveCheckpointRequest,
    SaveCheckpointResult,
    TokenOutput,
)
from jackfield.errors import EngineError
from jackfield.sdk.jagged import jagged
from jackfield_huggingface.names import CheckpointNames

Named = Iterator[tuple[str, torch.Tensor]]

logging.disable_progress_bar()


@attrs.frozen(kw_only=True)
class PlainConfig:
    """No settings."""


_FREE: dict[int, list[Any]] = {}  #: models of closed engines, by the model that they are copies of


@functools.cache
def _read(folder: str, dtype: torch.dtype) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    if report["missing_keys"]:
        raise ValueError(f"weights are missing: {sorted(report['missing_keys'])[:4]}")
    return model


@attrs.frozen(kw_only=True, eq=False)
class Micro:
    """One forward pass: b rows, S positions, T response tokens of the longest."""

    rows: list[int]
    input_ids: torch.Tensor  #: ``[b, S]``
    positions: torch.Tensor  #: ``[b, T]``: where each response token is predicted
    labels: torch.Tensor  #: ``[b, T]``
    mask: torch.Tensor  #: bool ``[b, T]``
    columns: Mapping[str, torch.Tensor]


class PlainEngine(BaseEngine):
    """One rank; several sum their gradients after each pass."""

    config: PlainConfig

    def __init__(self, config: PlainConfig, context: EngineContext) -> None:
        super().__init__(config, context)
        self.model: Any = None
        self.head: nn.Linear | None = None
        self.optimizer: torch.optim.AdamW | None = None
        self.mode: str | None = None
        self.schedule_step = 0
        self.random = torch.empty(0)
        self.made_group = False

    def initialize(self) -> None:
        self.join()
        self.load()
        if self.context.optimizer is not None:
            spec = self.context.optimizer
            self.optimizer = torch.optim.AdamW(
                self.parameters().values(),
                lr=self.rate(0),
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
            )
        with self.seeded():
            self.random = torch.get_rng_state()

    def load(self) -> None:
        spec = self.context.model
        try:
            model = self.fresh(_read(spec.path, getattr(torch, spec.dtype)))
        except (OSError, ValueError) as error:
            raise EngineError(f"no model in {spec.path}", code="engine.model") from error
        hidden_size = model.config.hidden_size
        for module in model.modules():
            if hasattr(module, "attention_dropout"):  # all the dropout that a Qwen3 has
                module.attention_dropout = self.dropout(model)
        if spec.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if spec.lora is not None:
            model = self.adapted(model)
        self.model = model.eval()
        if spec.value_head:
            self.head = self.made_head(hidden_size)

    def dropout(self, model: Any) -> float:
        return self.context.model.dropout

    def fresh(self, read: Any) -> Any:
        """A model of one's own, of a closed engine where there is one: to copy one takes longer than a pass."""
        free = _FREE.setdefault(id(read), [])
        if not free:
            return copy.deepcopy(read, {id(each): each for each in (read.config, read.generation_config)})
        model = free.pop()
        with torch.no_grad():
            for parameter, first in zip(model.parameters(), read.parameters(), strict=True):
                parameter.copy_(first)
                parameter.grad = None
        return model

    def adapted(self, model: nn.Module) -> Any:
        spec = self.context.model.lora
        assert spec is not None
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=spec.dropout,
            target_modules=list(spec.target_modules) or "all-linear",
        )
        with self.seeded(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # of PEFT
            return get_peft_model(model, config)

    def made_head(self, hidden_size: int) -> nn.Linear:
        with self.seeded():
            return nn.Linear(hidden_size, 1)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed())
            yield

    def seed(self) -> int:
        return self.context.seed

    def join(self) -> None:
        if self.context.world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=self.context.init_method,
                rank=self.context.rank,
                world_size=self.context.world_size,
            )
            self.made_group = True

    @property
    def layout(self) -> EngineLayout:
        self.ready()
        return EngineLayout(data_parallel_rank=self.context.rank, data_parallel_size=self.context.world_size)

    def ready(self) -> Any:
        if self.model is None:
            raise EngineError("not initialized", code="engine.state")
        return self.model

    def optimizing(self) -> torch.optim.AdamW:
        self.ready()
        if self.optimizer is None:
            raise EngineError("no optimizer", code="engine.state")
        return self.optimizer

    def close(self) -> None:
        spec = self.context.model
        if self.model is not None and spec.lora is None and not spec.gradient_checkpointing:
            _FREE[id(_read(spec.path, getattr(torch, spec.dtype)))].append(self.model)
        self.model = self.optimizer = self.head = self.mode = None
        if self.made_group:
            self.made_group = False
            dist.destroy_process_group()

    def train_mode(self) -> AbstractContextManager[None]:
        return self.in_mode("train")

    def eval_mode(self) -> AbstractContextManager[None]:
        return self.in_mode("eval")

    @contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        model, before = self.ready(), self.mode
        self.mode = mode
        self.turn(model, mode == "train")
        try:
            yield
        finally:
            self.mode = before
            self.turn(model, before == "train")

    def turn(self, model: Any, training: bool) -> None:
        if model.training != training:  # it goes through all modules
            model.train(training)

    def disable_adapter(self) -> AbstractContextManager[None]:
        model = self.ready()
        return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> EngineOutput:
        self.ready()
        self.check_mode(forward_only)
        results: dict[str, dict[int, torch.Tensor]] = {}
        losses: list[float] = []
        metrics: dict[str, float] = {}
        with self.gradients_on(forward_only), self.drawing():
            plan = self.plan(data)
            for micro in plan:
                output = self.forward(micro, bool(getattr(loss_function, "needs_entropy", False)))
                self.collect(results, micro, output)
                if loss_function is None:
                    continue
                loss, found = loss_function(output, TensorDict(dict(micro.columns), batch_size=[len(micro.rows)]))
                if not forward_only:
                    self.backward(loss, len(plan))
                losses.append(float(loss.detach()))
                self.merge(metrics, {name: float(value) for name, value in found.items()})
        nested = {name: self.in_order(by_row) for name, by_row in results.items()}
        return EngineOutput(loss=self.added_up(losses) if loss_function else None, metrics=metrics, **nested)

    def check_mode(self, forward_only: bool) -> None:
        if self.mode is None or (self.mode == "eval" and not forward_only):
            raise EngineError("a pass outside of its mode", code="engine.state")

    @contextmanager
    def gradients_on(self, forward_only: bool) -> Iterator[None]:
        """Inside, passes make gradients of their own; then they are summed over ranks and added to what was there."""
        if forward_only or self.context.world_size == 1:
            with torch.set_grad_enabled(not forward_only):
                yield
            return
        before = {name: parameter.grad for name, parameter in self.parameters().items()}
        for parameter in self.parameters().values():
            parameter.grad = None
        yield
        for name, parameter in self.parameters().items():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.reduce(own)
            earlier = before[name]
            parameter.grad = own if earlier is None else own + earlier

    def reduce(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, random numbers are the engine's own."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()

    def plan(self, data: TensorDict) -> list[Micro]:
        opened = {name: split_rows(value) if value.is_nested else value for name, value in data.items()}
        pairs = zip(opened["prompt_ids"], opened["response_ids"], strict=True)
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        groups: list[list[int]] = []
        for index in self.sequence(lengths):
            longest = max([lengths[index], *(lengths[other] for other in (groups[-1] if groups else []))])
            if groups and longest * (len(groups[-1]) + 1) <= self.context.micro_batch_tokens:
                groups[-1].append(index)
            else:
                groups.append([index])
        return [self.cut(opened, group) for group in groups]

    def sequence(self, lengths: Sequence[int]) -> list[int]:
        return sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def cut(self, data: Mapping[str, Any], group: list[int]) -> Micro:
        prompts, responses = ([data[name][index] for index in group] for name in ("prompt_ids", "response_ids"))
        ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        length = max(len(response) for response in responses)
        columns = {}
        for name, value in data.items():
            if name == "prompt_ids":
                continue
            if isinstance(value, torch.Tensor):
                columns[name] = value[group]
            else:
                columns[name] = self.padded(name, [value[index] for index in group], length)
        steps = torch.arange(length)
        sizes = torch.tensor([len(response) for response in responses])
        starts = torch.tensor([len(prompt) - 1 for prompt in prompts])
        mask = steps < sizes[:, None]
        positions = self.positions(starts[:, None] + steps).where(mask, 0)
        input_ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return Micro(
            rows=group,
            input_ids=input_ids,
            positions=positions,
            labels=columns["response_ids"],
            mask=mask,
            columns=columns,
        )

    def padded(self, name: str, values: list[torch.Tensor], length: int) -> torch.Tensor:
        return torch.stack([nn.functional.pad(value, (0, length - len(value))) for value in values])

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def forward(self, micro: Micro, want_entropy: bool) -> TokenOutput:
        result = self.model(input_ids=micro.input_ids, use_cache=False, output_hidden_states=self.head is not None)
        index = micro.positions[:, :, None]
        logits = result.logits.float().take_along_dim(index, 1) / self.temperature()
        log_probs = self.chosen(logits.log_softmax(-1), micro.labels)
        values = None
        if self.head is not None:
            values = self.head(result.hidden_states[-1].take_along_dim(index, 1).to(self.head.weight.dtype)).squeeze(-1)
        return TokenOutput(
            log_probs=self.blanked(log_probs, micro.mask),
            entropy=self.blanked(self.entropy(logits), micro.mask) if want_entropy else None,
            values=None if values is None else self.blanked(values, micro.mask),
        )

    def temperature(self) -> float:
        return self.context.temperature

    def chosen(self, all_log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return all_log_probs.take_along_dim(labels[:, :, None], 2).squeeze(2)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    def blanked(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tokens.where(mask, 0.0)

    def backward(self, loss: torch.Tensor, micro_batches: int) -> None:
        loss.backward()

    def collect(self, results: dict[str, dict[int, torch.Tensor]], micro: Micro, output: TokenOutput) -> None:
        for name in ("log_probs", "entropy", "values"):
            dense = getattr(output, name)
            if dense is not None:
                by_row = results.setdefault(name, {})
                for place, row in enumerate(micro.rows):
                    by_row[row] = self.kept(dense[place][micro.mask[place]])

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.detach().float()

    def in_order(self, by_row: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return jagged([by_row[index] for index in range(len(by_row))])

    def added_up(self, losses: list[float]) -> float:
        return sum(losses)

    def merge(self, metrics: dict[str, float], found: Mapping[str, float]) -> None:
        for name, value in found.items():
            if name not in metrics:
                metrics[name] = value
            elif name.endswith("/max"):
                metrics[name] = max(metrics[name], value)
            elif name.endswith("/min"):
                metrics[name] = min(metrics[name], value)
            else:
                metrics[name] += value

    def parameters(self) -> dict[str, nn.Parameter]:
        named = dict(self.model.named_parameters())
        if self.head is not None:
            named |= {f"value_head.{name}": parameter for name, parameter in self.head.named_parameters()}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def optimizer_zero_grad(self) -> None:
        self.optimizing().zero_grad()

    def optimizer_step(self) -> float:
        optimizer, spec = self.optimizing(), self.spec()
        held = [parameter for parameter in self.parameters().values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in held])
        if not self.usable(norm):
            return float(norm)
        if spec.clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(held, spec.clip_grad, norm)
        optimizer.step()
        return float(norm)

    def usable(self, norm: torch.Tensor) -> bool:
        return bool(norm.isfinite())

    def spec(self) -> OptimizerSpec:
        assert self.context.optimizer is not None
        return self.context.optimizer

    def lr_scheduler_step(self) -> float:
        self.optimizing()
        self.schedule_step += 1
        return self.set_rate(self.rate(self.schedule_step))

    def set_rate(self, rate: float) -> float:
        for group in self.optimizing().param_groups:
            group["lr"] = rate
        return rate

    def rate(self, step: int) -> float:
        spec = self.spec()
        if step < spec.warmup_steps:
            return spec.lr * step / spec.warmup_steps
        if spec.scheduler == "constant":
            return spec.lr
        assert spec.total_steps is not None
        progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
        left = 1.0 - progress if spec.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * left)

    def get_per_tensor_param(
        self,
    ) -> tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]:
        self.ready()
        return (pair for pair in self.exported()), self.adapter_config()

    def exported(self) -> Named:
        if isinstance(self.model, PeftModel):
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    yield published(name), parameter.detach()
            return
        names, held = CheckpointNames(self.model, Path(self.context.model.path)), self.model.state_dict()
        for group in names.groups:
            yield from names.to_checkpoint(group, [held[part].detach() for part in group.parts]).items()

    def adapter_config(self) -> Mapping[str, Any] | None:
        if not isinstance(self.model, PeftModel):
            return None
        return {name: plain(value) for name, value in self.model.peft_config["default"].to_dict().items()}

    def get_per_tensor_grad(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        self.optimizing()
        for name, parameter in self.parameters().items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            yield published(name) if isinstance(self.model, PeftModel) else name, gradient

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.ready()

    def save_checkpoint(self, request: SaveCheckpointRequest) -> SaveCheckpointResult:
        self.ready()
        folder = Path(request.folder)
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self.write(folder) if request.format == "native" else self.write_folder(folder)
        if self.context.world_size > 1:
            dist.barrier()
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
        return SaveCheckpointResult(folder=request.folder, files=files)

    def write_folder(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def write(self, folder: Path) -> None:
        save_file(
            {name: tensor.contiguous().clone() for name, tensor in self.state().items()}, folder / "state.safetensors"
        )
        facts = {"schedule_step": self.schedule_step, "world_size": self.context.world_size}
        (folder / "facts.json").write_text(json.dumps(facts))

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model:{name}": parameter.detach() for name, parameter in self.parameters().items()}
        found["random"] = self.random
        if self.optimizer is not None:
            for name, parameter in self.parameters().items():
                for part, value in self.optimizer.state[parameter].items():
                    found[f"{part}:{name}"] = value
        return found

    def load_checkpoint(self, request: LoadCheckpointRequest) -> LoadCheckpointResult:
        self.ready()
        folder = Path(request.folder)
        self.restore(load_file(folder / "state.safetensors"), json.loads((folder / "facts.json").read_text()), request)
        return LoadCheckpointResult(folder=request.folder)

    def restore(
        self, state: Mapping[str, torch.Tensor], facts: Mapping[str, Any], request: LoadCheckpointRequest
    ) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(state[f"model:{name}"])
        if request.model_only:
            return
        self.random = state["random"]
        if self.optimizer is not None:
            for name, parameter in self.parameters().items():
                for part in ("step", "exp_avg", "exp_avg_sq"):
                    if f"{part}:{name}" in state:
                        self.optimizer.state[parameter][part] = state[f"{part}:{name}"]
            self.schedule_step = facts["schedule_step"]
            self.set_rate(self.rate(self.schedule_step))


def split_rows(nested: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a jagged tensor; ``unbind`` takes a millisecond."""
    values, offsets = nested.values(), nested.offsets().tolist()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]


def published(name: str) -> str:
    """PEFT's file name of an adapter's parameter."""
    return name.replace(".default.", ".")


def plain(value: Any) -> Any:
    """A value of a PEFT config as JSON has it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    with contextlib.suppress(TypeError):
        json.dumps(value)
        return value
    return str(value)

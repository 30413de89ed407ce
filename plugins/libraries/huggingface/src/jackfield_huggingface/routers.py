"""The routers of mixtures of experts: which experts they choose for each token, and choices that are made for them.

A router of the library calls ``torch.topk`` on its scores and computes the experts' weights from what that returns. So
its choice is read, or replaced, in this call; everything around it stays the model's own.

Shapes: ``N`` tokens of a pass in the order of the flattened input, ``l`` layers with experts, ``k`` experts per token,
``E`` experts of a layer.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from jackfield.errors import EngineError, RolloutError
from jackfield_huggingface.names import auto_class

_CHOICE = re.compile(r"\btopk\(")
_TOPK = {torch.topk, torch.Tensor.topk}
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


class _Choice(TorchFunctionMode):
    """Sees each call of ``topk``; ``chosen`` may replace the experts of the last one."""

    def __init__(self, last: int | None, chosen: torch.Tensor | None) -> None:
        super().__init__()
        self.calls, self._last, self._chosen = 0, last, chosen
        self.experts: torch.Tensor | None = None  #: int64 ``[N, k]`` of the newest call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        self.calls += 1
        if self._chosen is not None and self.calls == self._last:
            scores = args[0]
            experts = torch.where(self._chosen >= 0, self._chosen, result.indices).to(result.indices.dtype)
            result = torch.return_types.topk((scores.gather(-1, experts), experts))
        self.experts = result.indices
        return result


@attrs.define(eq=False)
class _Router:
    """One module that chooses experts."""

    module: nn.Module
    forward: Callable[..., Any] = attrs.field(init=False)
    logits: nn.Module | None = None  #: whose output has the router's logits; None: unknown
    logits_index: int = 0
    calls: int | None = None  #: of ``topk`` in a pass; None: there was none yet
    chosen: torch.Tensor | None = None  #: int64 ``[N, k]``, for the next passes
    experts: torch.Tensor | None = None  #: int64 ``[N, k]`` of the newest pass
    scores: torch.Tensor | None = None  #: logits ``[N, E]`` of the newest pass, with gradients


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        names = list(_choosing(model))
        self._routers = [_Router(model.get_submodule(name)) for name in names]
        self.experts: int | None = None  #: ``k``, known after a pass
        self._keeps_logits = False
        for router in self._routers:
            router.forward = router.module.forward
            router.module.forward = MethodType(_wrapped(router), router.module)
        self._find_logits(model, names)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers | None:
        """Return the routers of a model; None if it has none that choose by ``topk``."""
        return cls(model) if any(True for _ in _choosing(model)) else None

    @property
    def layers(self) -> int:
        """Return the number of layers with experts."""
        return len(self._routers)

    @property
    def has_logits(self) -> bool:
        """Return whether the logits of every router are known."""
        return all(router.logits is not None for router in self._routers)

    def replay(self, experts: torch.Tensor | None) -> None:
        """Use these experts in the next passes, integers ``[N, l, k]``; -1: the router chooses. None: it always does.

        They are kept until the next call, because a backward pass may compute a layer again.
        """
        for number, router in enumerate(self._routers):
            router.chosen = None if experts is None else experts[:, number].long()

    def taken(self) -> torch.Tensor:
        """Return the experts of the newest pass, int16 ``[N, l, k]``."""
        found = [router.experts for router in self._routers]
        assert all(each is not None for each in found), "every router has run"
        return torch.stack([each for each in found if each is not None], dim=1).to(torch.int16)

    @contextmanager
    def keeping_logits(self) -> Iterator[None]:
        """Keep the logits of passes inside the block, for :meth:`balance`."""
        for router in self._routers:
            router.scores = None
        handles = [self._hook(router) for router in self._routers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def balance(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the load-balancing loss of each row, float32 ``[count]``, the mean over layers.

        ``rows`` are int64 ``[N]``: the row of each token, -1 for padding. Of a row and a layer it is the sum over
        experts of (share of the row's choices) x (mean probability) x ``E``: 1 if the load is even. It is a function of
        each row alone, so that no split of a batch changes its sum (the sequence-wise loss of DeepSeek-V3,
        arXiv:2412.19437, equations 17 to 20, with the softmax of the logits as the probability).
        """
        inside = rows >= 0
        places = rows[inside]
        tokens = torch.bincount(places, minlength=count).clamp(min=1).unsqueeze(1)
        losses = []
        for router in self._routers:
            assert router.scores is not None, "inside of keeping_logits"
            assert router.experts is not None, "the router has run"
            logits = router.scores.flatten(0, -2).float()
            probabilities = F.softmax(logits, dim=-1)[inside]
            chosen = torch.zeros_like(logits).scatter_(1, router.experts.flatten(0, -2), 1.0)[inside]
            empty = probabilities.new_zeros(count, logits.shape[-1])
            share = empty.index_add(0, places, chosen) / tokens / router.experts.shape[-1]
            mean = empty.index_add(0, places, probabilities) / tokens
            losses.append((share * mean).sum(-1) * logits.shape[-1])
        return torch.stack(losses).mean(0)

    def _find_logits(self, model: PreTrainedModel, names: list[str]) -> None:
        """Find each router's logits as the library does for its own loss."""
        kinds = getattr(model, "_can_record_outputs", None) or getattr(model.base_model, "_can_record_outputs", None)
        recorder = (kinds or {}).get("router_logits")
        recorder = recorder[0] if isinstance(recorder, list | tuple) and recorder else recorder
        target = getattr(recorder, "target_class", recorder)
        if not isinstance(target, type) or not issubclass(target, nn.Module):
            return
        for router, name in zip(self._routers, names, strict=True):
            inside = [each for each in router.module.modules() if isinstance(each, target)]
            parent = model.get_submodule(name.rpartition(".")[0])
            inside = inside or [each for each in parent.modules() if isinstance(each, target)]
            if len(inside) == 1:
                router.logits, router.logits_index = inside[0], getattr(recorder, "index", 0)

    @staticmethod
    def _hook(router: _Router) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            router.scores = output[router.logits_index] if isinstance(output, tuple) else output

        assert router.logits is not None, "checked by has_logits"
        return router.logits.register_forward_hook(keep)


@attrs.frozen
class RoutedLayers:
    """Which layers of a model have experts, for engines that return a row for every layer."""

    layers: tuple[int, ...]  #: numbers of the layers with experts, ascending
    total: int  #: number of all layers
    chosen: int | None = None  #: experts per token, where the configuration says so under the usual name

    @classmethod
    def of(cls, folder: str, trust_remote_code: bool = False) -> RoutedLayers:
        """Return those of the model in ``folder``, without its weights; ``engine.model`` if it has no experts."""
        place = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        config = AutoConfig.from_pretrained(folder, **place)
        with torch.device("meta"):
            model = auto_class(Path(folder), trust_remote_code).from_config(config, trust_remote_code=trust_remote_code)
        numbers = [_LAYER.search(name) for name in _choosing(model)]
        found = tuple(int(number[1]) for number in numbers if number is not None)
        if not found or len(found) != len(numbers) or len(found) != len(set(found)):
            raise EngineError(
                f"{type(model).__name__} has no routers whose choice can be replayed",
                code="engine.model",
                where="model.router_replay",
                expected="a mixture of experts whose routers choose by topk",
                found=folder,
                fix="set model.router_replay: false",
            )
        text = config.get_text_config(decoder=True)
        chosen = getattr(text, "num_experts_per_tok", None)
        return cls(found, int(text.num_hidden_layers), chosen if isinstance(chosen, int) else None)

    def experts(self, values: np.ndarray[Any, Any] | None, tokens: int) -> np.ndarray[Any, Any]:
        """Return what an engine reports of ``tokens`` as int16 ``[tokens, l, k]``.

        ``values`` are integers of ``[tokens, total, k]``, in any shape; ``rollout.failed`` if they are not as many.
        """
        size, per_token = 0 if values is None else values.size, tokens * self.total * (self.chosen or 1)
        if values is None or not size or size % per_token or (self.chosen and size != per_token):
            raise RolloutError(
                "the engine has not returned the experts of each token",
                code="rollout.failed",
                where="model.router_replay",
                expected=f"{tokens} tokens x {self.total} layers x {self.chosen or 'experts per token'}",
                found=f"{size} numbers",
            )
        return values.reshape(tokens, self.total, -1)[:, self.layers].astype(np.int16)


def _choosing(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the modules whose own code chooses experts."""
    known: dict[type, bool] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in known:
            known[kind] = kind.__module__.startswith("transformers.") and _chooses(kind)
        if known[kind]:
            yield name


def _chooses(kind: type) -> bool:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return False
    own = "forward" in vars(kind) and not issubclass(kind, PreTrainedModel)
    return own and bool(_CHOICE.search(source)) and "expert" in source


def _wrapped(router: _Router) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if router.chosen is not None and router.calls is None:  # which of its calls is the choice
            with torch.no_grad(), _Choice(None, None) as trial:
                router.forward(*args, **kwargs)
            router.calls = trial.calls
        with _Choice(router.calls, router.chosen) as choice:
            result = router.forward(*args, **kwargs)
        router.calls = choice.calls
        router.experts = None if choice.experts is None else choice.experts.detach()
        return result

    return forward

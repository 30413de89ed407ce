"""Log-probabilities and entropies over a vocabulary that tensor-parallel ranks share; logits are never gathered.

Shapes: ``N`` tokens, ``H`` hidden size, ``V`` vocabulary of this rank.
"""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch.utils.checkpoint import checkpoint

from jackfield_engine_megatron.ranks import Ranks


@attrs.frozen(eq=False)
class Vocabulary:
    """The output layer of this rank, and how logits become log-probabilities."""

    ranks: Ranks
    size: int  #: tokens of the whole vocabulary, without padding
    temperature: float
    chunk: int  #: logits at once

    def statistics(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities of ``labels`` int64 ``[N]``, and entropies, float32 ``[N]``.

        ``hidden`` ``[N, H]`` is whole on each tensor-parallel rank, and its gradient is summed over them by the caller;
        ``weight`` is ``[V, H]``.
        """
        rows = max(1, self.chunk // weight.shape[0])
        if len(labels) <= rows or not torch.is_grad_enabled():
            parts = [
                self._piece(each, weight, label, want_entropy)
                for each, label in zip(hidden.split(rows), labels.split(rows), strict=True)
            ]
        else:
            parts = [
                checkpoint(
                    self._piece, each, weight, label, want_entropy, use_reentrant=False, preserve_rng_state=False
                )
                for each, label in zip(hidden.split(rows), labels.split(rows), strict=True)
            ]
        log_probs = torch.cat([part[0] for part in parts])
        return log_probs, torch.cat([part[1] for part in parts]) if want_entropy else None

    def _piece(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.ranks.tensor
        first = group.rank() * weight.shape[0]
        logits = F.linear(hidden, weight).float() / self.temperature
        own = max(0, min(weight.shape[0], self.size - first))
        logits = logits[:, :own]
        largest = torch.full_like(hidden[:, 0], -torch.inf, dtype=torch.float32)
        if own:
            largest = logits.detach().amax(-1)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        exponents = shifted.exp()
        total = reduce_from_tensor_model_parallel_region(exponents.sum(-1), group)
        place = labels - first
        here = (place >= 0) & (place < own)
        chosen = shifted.gather(1, place.clamp(0, max(own - 1, 0))[:, None]).squeeze(1) if own else shifted.sum(-1)
        chosen = reduce_from_tensor_model_parallel_region(torch.where(here, chosen, torch.zeros_like(chosen)), group)
        log_total = total.log()
        log_probs = chosen - log_total
        if not want_entropy:
            return log_probs, log_probs
        mean = reduce_from_tensor_model_parallel_region((exponents * shifted).sum(-1), group) / total
        return log_probs, log_total - mean

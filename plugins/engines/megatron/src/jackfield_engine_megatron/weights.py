"""The parameters of this rank: read from a checkpoint's tensors, and gathered into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jackfield_engine_megatron.architecture import Architecture
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.model import first_layer, padded_vocabulary
from jackfield_engine_megatron.names import Piece, pieces
from jackfield_engine_megatron.ranks import Ranks

#: Returns a tensor of a parameter's shape on this rank: the parameter, its gradient, or a moment.
Select = Callable[[nn.Parameter], torch.Tensor]


class Weights:
    """The model's pieces, and which of them this rank has."""

    def __init__(self, config: Config, architecture: Architecture, ranks: Ranks, chunks: list[Any]) -> None:
        self._config, self._sizes, self._ranks = config, architecture, ranks
        self.pieces = tuple(pieces(architecture))
        self._models = [chunk.module for chunk in chunks]
        self._named = [dict(model.named_parameters()) for model in self._models]
        places = {number: self._find(piece) for number, piece in enumerate(self.pieces)}
        self.local = {number: found for number, found in places.items() if found is not None}

    @property
    def _layers_per_chunk(self) -> int:
        return self._sizes.layers // (self._config.pipeline_parallel * self._config.virtual_pipeline_stages)

    def _stage(self, piece: Piece) -> int:
        """Return the pipeline stage that has a piece."""
        stages = self._config.pipeline_parallel
        if piece.layer is None:
            return stages - 1 if piece.last_stage else 0
        return piece.layer // self._layers_per_chunk % stages

    def _expert_owner(self, expert: int) -> tuple[int, int]:
        """Return the expert-parallel rank that has an expert, and the expert's number there."""
        assert self._sizes.experts is not None, "there are experts"
        return divmod(expert, self._sizes.experts.count // self._config.expert_parallel)

    def _find(self, piece: Piece) -> nn.Parameter | None:
        if self._stage(piece) != self._ranks.pipeline.rank():
            return None
        owner, expert = (0, 0) if piece.expert is None else self._expert_owner(piece.expert)
        if piece.expert is not None and owner != self._ranks.expert.rank():
            return None
        chunk = len(self._named) - 1 if piece.last_stage else 0
        layer = piece.layer
        if layer is not None:
            chunk = layer // (self._layers_per_chunk * self._config.pipeline_parallel)
            layer -= first_layer(self._config, self._ranks, self._sizes.layers, chunk)
        found: torch.nn.Parameter = self._named[chunk][piece.name.format(layer=layer, expert=expert)]
        return found

    def named(self) -> Iterator[tuple[Piece, nn.Parameter]]:
        """Yield the pieces that this rank has, with their parameters."""
        for number, parameter in self.local.items():
            yield self.pieces[number], parameter

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Return the last stage's copy of the embedding, where embeddings are tied and this stage has the copy."""
        model = self._models[-1]
        apart = self._sizes.tied and model.post_process and not model.pre_process
        return model.output_layer.weight if apart else None

    def counts(self, piece: Piece, *, every_replica: bool = False) -> bool:
        """Return whether this rank's part stands for itself: no other rank with the same part counts.

        With ``every_replica``, data-parallel ranks have different parts, too.
        """
        first_of_tensor = piece.is_split or piece.expert is not None or self._ranks.tensor.rank() == 0
        return first_of_tensor and (every_replica or self.replicas(piece).rank() == 0)

    def replicas(self, piece: Piece) -> Any:
        """Return the group of ranks that have the same part of a piece."""
        return self._ranks.data if piece.expert is None else self._ranks.expert_data

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor], select: Select) -> None:
        """Copy a checkpoint's tensors into what ``select`` returns for each parameter of this rank."""
        for piece, parameter in self.named():
            self._load(piece, select(parameter), read)
        if self.tied_copy is not None:
            self._load(self.pieces[0], select(self.tied_copy), read)

    def _load(self, piece: Piece, target: torch.Tensor, read: Callable[[str], torch.Tensor]) -> None:
        tensors = [read(name) for name in piece.tensors]
        rank, size = self._ranks.tensor.rank(), self._ranks.tensor.size()
        if piece.form == "vocabulary":
            rows = padded_vocabulary(self._config, self._sizes)
            padded = tensors[0].new_zeros((rows, tensors[0].shape[1]))
            padded[: len(tensors[0])] = tensors[0]
            target.copy_(padded.chunk(size)[rank])
        else:
            target.copy_(piece.shard(tensors, rank, size, self._sizes))

    @torch.no_grad()
    def own(self, select: Select) -> Iterator[tuple[Piece, dict[str, torch.Tensor]]]:
        """Yield the pieces that this stage and expert-parallel rank have, as a checkpoint's tensors.

        A collective operation of the tensor-parallel ranks.
        """
        for piece, parameter in self.named():
            yield piece, self._whole(piece, select(parameter))

    def _whole(self, piece: Piece, value: torch.Tensor) -> dict[str, torch.Tensor]:
        value = value.detach()
        size = self._ranks.tensor.size() if piece.is_split else 1
        shards = [value]
        if size > 1:
            shards = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(shards, value.contiguous(), group=self._ranks.tensor)
        return piece.whole(shards, self._sizes)

    @torch.no_grad()
    def gathered(self, select: Select, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the whole model, as copies on the device. A collective operation of all ranks."""
        ranks = self._ranks
        for number, piece in enumerate(self.pieces):
            parameter = self.local.get(number)
            if parameter is not None:
                found = self._whole(piece, select(parameter))
            else:
                found = {n: torch.empty(shape, dtype=dtype, device=ranks.device) for n, shape in piece.tensors.items()}
            stage = self._stage(piece)
            for name, tensor in found.items():
                if piece.expert is not None and ranks.expert.size() > 1 and stage == ranks.pipeline.rank():
                    owner, _ = self._expert_owner(piece.expert)
                    dist.broadcast(tensor, group=ranks.expert, group_src=owner)
                if ranks.pipeline.size() > 1:
                    dist.broadcast(tensor, group=ranks.pipeline, group_src=stage)
                whole = parameter is not None and tensor.untyped_storage().data_ptr() == (
                    select(parameter).untyped_storage().data_ptr()
                )
                yield name, tensor.clone() if whole else tensor

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the whole model's tensors."""
        return {name: shape for piece in self.pieces for name, shape in piece.tensors.items()}

"""The steps from a whole model to this rank's place in the grid of ranks."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.memory import compile_layers
from jackfield_engine_fsdp.mesh import Mesh
from jackfield_engine_fsdp.model import TokenModel
from jackfield_engine_fsdp.sequence import SequenceParallel
from jackfield_engine_fsdp.sharding import decoder_layers, shard
from jackfield_engine_fsdp.tensor import parallelize


def spread(model: TokenModel, mesh: Mesh, config: Config) -> FSDPModule:
    """Split layers and rows as configured, compile layers, and shard what this rank has, in place; return the model."""
    causal_lm, layers = model.causal_lm, decoder_layers(model.causal_lm)
    sequence = None
    if mesh.tensor is not None:
        parallelize(causal_lm, layers, mesh.tensor, trial=mesh.tensor.device_type == "cpu")
    if mesh.sequence is not None:
        sequence = SequenceParallel(causal_lm, causal_lm.config._attn_implementation, mesh.sequence.get_group())
    if config.compile != "none":
        compile_layers(layers, config.compile)
    sharded = shard(model, mesh, config)
    if sequence is not None:
        sequence.attach(model)
    return sharded

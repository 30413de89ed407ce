"""Settings of the engine. Importable without torch."""

from __future__ import annotations

from typing import Literal, NoReturn

import attrs
from attrs.validators import ge, gt, optional

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError
from jackfield.sdk import option
from jackfield_engine_fsdp.optimizer_options import read_options
from jackfield_engine_fsdp.sizes import Sizes

_ON_GPUS = ("flash_attention_2", "flash_attention_3", "flex_attention")  #: without a backward pass on a CPU
_WHOLE_ROWS = ("router_replay", "router_aux_loss")  #: settings of a model that need whole rows


@attrs.frozen(kw_only=True)
class Config:
    """How the model is sharded and computed. The engine's context says what is trained, and how."""

    mixed_precision: Literal["none", "bfloat16"] = option(
        "none",
        "Arithmetic of forward and backward passes. bfloat16: parameters are gathered in bfloat16 and gradients "
        "reduced in float32, while the sharded weights and the optimizer keep the model's dtype.",
    )
    master_weights: bool = option(
        True,
        "Where a model in bfloat16 or float16 is trained, keep its weights, gradients and optimizer state in "
        "float32; passes run in the model's dtype, and published weights are cast to it. false: half the memory, and "
        "updates that are smaller than the spacing of a weight's neighbours are lost (the log says how many).",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"] = option(
        "auto",
        "Attention kernel of transformers. auto: sdpa, and eager where the architecture wants it (attention sinks, a "
        "soft cap of attention scores), which is logged. sdpa and eager run everywhere, the others need their own "
        "packages.",
    )
    packing: bool = option(
        True,
        "Put the tokens of a micro-batch into one row without padding, where the model takes it, which is tried when "
        "it is loaded. Otherwise, and with false, rows are padded, and the log says why.",
    )
    wrap: Literal["auto", "layers", "root"] = option(
        "auto",
        "What is gathered at once. layers: one decoder layer after the other, the least memory; root: the whole "
        "model, the fewest collectives; auto: layers where a layer has wrap_min_parameters.",
    )
    wrap_min_parameters: int = option(
        1_000_000, "With wrap auto: parameters of a decoder layer that is gathered alone.", gt(0)
    )
    reshard_after_forward: bool = option(
        True, "Free a layer's gathered weights after its forward pass and gather them again for its backward pass."
    )
    reshard_size: int | None = option(
        None,
        "With reshard_after_forward: keep each layer's weights sharded over this many ranks between its forward and "
        "its backward pass, such as those of one node; null: over all that share them.",
        optional(ge(2)),
    )
    shard_size: int | None = option(
        None,
        "Ranks over which a layer's weights are sharded, beside their tensor-parallel parts; further groups of as many "
        "ranks hold copies (HSDP). null: all ranks, one copy.",
        optional(ge(1)),
    )
    sequence_parallel: int = option(
        1,
        "Ranks that compute parts of the same rows: positions are split, and attention's heads in their place (Ulysses)"
        ". micro_batch_tokens then counts a rank's own positions.",
        ge(1),
    )
    tensor_parallel: int = option(
        1, "Neighbouring ranks that have parts of each decoder layer, by the library's plan for the model.", ge(1)
    )
    gradient_accumulation: Literal["auto", "sharded", "unsharded"] = option(
        "auto",
        "Where gradients of several micro-batches add up. sharded: reduced after each one; unsharded: reduced "
        "once, after the last (a whole gradient per rank in memory); auto: unsharded where several ranks train at "
        "most unsharded_max_parameters.",
    )
    unsharded_max_parameters: int = option(
        100_000_000, "With gradient_accumulation auto: parameters of a model, at most.", gt(0)
    )
    cpu_offload: bool = option(
        False,
        "Keep weights, gradients and optimizer state in the host's memory and stream them to the accelerator. "
        "No effect when the device is the CPU.",
    )
    optimizer_offload: bool = option(
        False,
        "Keep the optimizer's state in the host's memory, and move it to the accelerator for each step. No effect when "
        "the device is the CPU.",
    )
    activation_offload: bool = option(
        False,
        "Keep what a forward pass saves for the backward pass in the host's memory, but for weights and small tensors. "
        "With gradient_checkpointing that is the input of each layer.",
    )
    compile: Literal["none", "inductor", "aot_eager"] = option(
        "none", "Compile each decoder layer with this backend of torch.compile; the first passes take much longer."
    )
    logits_chunk: int = option(
        1 << 26,
        "At most this many logits exist at once, as float32 numbers. Micro-batches with more response tokens x words "
        "compute output layer, log-probabilities and entropy in pieces, and the pieces again in the backward pass.",
        gt(0),
    )
    extra_threads: int = option(
        0,
        "On a CPU, threads that a pass uses beyond cluster.threads while no replica in this process generates. "
        "The last bits of results then depend on when replicas were idle.",
        ge(0),
    )
    collective_timeout: float = option(
        600.0, "Seconds that ranks wait for each other in a collective operation before they fail.", gt(0)
    )

    def sizes(self, world: int) -> Sizes:
        """Return the grid of ``world`` ranks, or refuse sizes that do not divide them (``config.invalid-value``)."""
        split = {"sequence": self.sequence_parallel, "tensor": self.tensor_parallel}
        return Sizes.of(world, shard=self.shard_size, reshard=self.reshard_size, **split)

    def check(self, context: EngineContext) -> None:
        """Refuse ranks, optimizers and combinations that do not fit (``config.invalid-value``); no model is read."""
        spec = context.model
        self.sizes(context.world_size)
        if context.device == "cpu" and self.attention in _ON_GPUS and context.optimizer is not None:
            _refuse(f"{self.attention} trains on GPUs alone", "engine.attention", "auto")
        if context.optimizer is not None:
            read_options(context.optimizer)
        whole = next((name for name in _WHOLE_ROWS if getattr(spec, name)), None)
        if whole is not None and self.sequence_parallel > 1:
            _refuse(f"model.{whole} needs whole rows, which sequence_parallel splits", "engine.sequence_parallel", 1)
        if spec.lora is not None and spec.lora.use_dora and self.tensor_parallel > 1:
            _refuse("DoRA needs norms of whole matrices, which tensor_parallel splits", "engine.tensor_parallel", 1)
        if self.compile != "none" and self.tensor_parallel > 1:
            _refuse("torch.compile does not trace layers that are split over ranks", "engine.compile", "none")


def _refuse(message: str, where: str, expected: object) -> NoReturn:
    fix = f"set {where} to {expected}"
    raise EngineError(message, code="config.invalid-value", where=where, expected=expected, fix=fix)

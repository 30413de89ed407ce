"""Checks of engines: exports, life, ranks and GPUs."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors.torch import load_file

from jackfield.abc.engine import BaseEngine, LoadCheckpointRequest, SaveCheckpointRequest
from jackfield.errors import EngineError, JackfieldError
from jackfield.sdk.slices import part_of
from jackfield_conformance.registry import Skipped, Subject, check
from jackfield_conformance.support import engine as support
from jackfield_conformance.support import engine_ranks
from jackfield_conformance.support.expecting import assert_names, refused
from jackfield_conformance.support.processes import assert_nothing_left

_EXPORT = "docs/plugins/engine.md#export"
_LIFE = "docs/plugins/engine.md#life"


@check("ENG-034", page=_EXPORT)
def a_mixture_is_exported_as_its_checkpoint_has_it(subject: Subject) -> None:
    """The experts of a mixture are exported one by one with the names, shapes and values of the safetensors file, or
    ``initialize`` refuses the model."""
    folder = support.mixture_folder()
    wanted = _experts(load_file(folder / "model.safetensors"))
    engine = subject.make(support.context_of(subject, folder))
    try:
        try:
            engine.initialize()
        except JackfieldError:
            return
        found = _experts(support.weights(engine))
    finally:
        engine.close()
    assert_names(wanted, found, "exported experts")
    # ENG-031 is about bits; this is about which values have which name
    wrong = [
        name
        for name, tensor in wanted.items()
        if tensor.shape != found[name].shape or not torch.allclose(tensor, found[name], rtol=0.02, atol=1e-4)
    ]
    assert not wrong, f"exported with other shapes or values than the checkpoint's: {wrong[:4]}"


def _experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "experts" in name}


def _state_dict(folder: Path, dtype: torch.dtype, tied: bool) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = dict(support.plain_model(folder, dtype).state_dict())
    if tied:
        state.pop("lm_head.weight")
    return state


@check("ENG-030", page=_EXPORT)
def exported_names_are_those_of_hugging_face(subject: Subject) -> None:
    """Exported names are exactly those of the Hugging Face state dict, with tied tensors once and no PEFT config."""
    for tied in (True, False):
        folder = support.model_folder(tied=tied)
        wanted = _state_dict(folder, torch.float32, tied)
        with support.opened(subject, folder) as engine:
            tensors, adapter = engine.get_per_tensor_param()
            pairs = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        assert adapter is None, f"a model without an adapter is exported with a PEFT config: {adapter}"
        what = f"exported tensors (embeddings {'tied' if tied else 'not tied'})"
        assert_names(wanted, [name for name, _ in pairs], what)
        shapes = {name: shape for name, shape in pairs if shape != wanted[name].shape}
        assert not shapes, f"not exported in full: {shapes}"


@check("ENG-031", page=_EXPORT)
def exported_values_are_bit_exact(subject: Subject) -> None:
    """Exported values are bit for bit those of the model folder in the dtype of the context's model, even if a tensor
    is read after the next one was drawn."""
    for dtype in ("float32", "bfloat16"):
        wanted = _state_dict(support.model_folder(), getattr(torch, dtype), tied=True)
        with support.opened(subject, dtype=dtype) as engine:
            pairs = itertools.pairwise(itertools.chain(engine.get_per_tensor_param()[0], [None]))
            found = {pair[0]: pair[1].detach().cpu().clone() for pair, _ in pairs if pair is not None}
        for name in wanted.keys() & found.keys():
            one = {name: wanted[name]}
            support.assert_same_tensors(one, {name: found[name]}, f"exported values of a {dtype} model")


@check("ENG-032", page=_EXPORT, using=support.opened)
def exports_follow_training(subject: Subject, engine: BaseEngine) -> None:
    """After an optimizer step every exported tensor that had a gradient has changed, also in a second export."""
    before = support.weights(engine)
    for step in ("the first step", "the second step"):
        support.train(engine)
        after = support.weights(engine)
        same = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
        assert not same, f"exported as they were before {step}: {same[:4]}"
        before = after


@check("ENG-033", page=_EXPORT)
def a_hugging_face_folder_loads(subject: Subject) -> None:
    """A folder that is saved in format ``huggingface`` loads with ``from_pretrained`` and equals the export."""
    from transformers import AutoModelForCausalLM

    folder = subject.folder / "huggingface"
    for tied in (True, False):
        shutil.rmtree(folder, ignore_errors=True)
        with support.opened(subject, support.model_folder(tied=tied)) as engine:
            support.train(engine)
            engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder), format="huggingface"))
            wanted = support.weights(engine)
        with support.without_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        problems = {name: sorted(map(str, found)) for name, found in report.items() if found}
        assert not problems, f"from_pretrained reports {problems}"
        found = dict(model.state_dict())
        if tied:
            found.pop("lm_head.weight")
        support.assert_same_tensors(wanted, found, "weights of the saved folder")


@check("ENG-070", page=_LIFE)
def use_before_initialize_is_refused(subject: Subject) -> None:
    """Before ``initialize`` every use raises EngineError ``engine.state``."""
    engine = subject.make(support.context_of(subject))

    def enter(mode: Any) -> None:
        with mode:
            pass

    uses = {
        "layout": lambda: engine.layout,
        "train_mode": lambda: enter(engine.train_mode()),
        "eval_mode": lambda: enter(engine.eval_mode()),
        "forward_backward_batch": lambda: engine.forward_backward_batch(support.batch(), support.Loss()),
        "optimizer_zero_grad": engine.optimizer_zero_grad,
        "optimizer_step": engine.optimizer_step,
        "lr_scheduler_step": engine.lr_scheduler_step,
        "get_per_tensor_param": lambda: list(engine.get_per_tensor_param()[0]),
        "get_per_tensor_grad": lambda: list(engine.get_per_tensor_grad()),
    }
    try:
        for name, use in uses.items():
            with refused(EngineError, "engine.state", what=f"{name} before initialize"):
                use()
    finally:
        engine.close()


@check("ENG-071", page=_LIFE, using=support.opened)
def passes_outside_of_a_mode_are_refused(subject: Subject, engine: BaseEngine) -> None:
    """A pass outside of ``train_mode`` and ``eval_mode`` raises EngineError ``engine.state``."""
    data = support.batch()
    for when in ("before any mode", "after a mode"):
        with refused(EngineError, "engine.state", what=f"a pass {when}"):
            engine.forward_backward_batch(data, None, forward_only=True)
        with engine.train_mode():
            pass
    with engine.train_mode(), engine.eval_mode():
        pass
    with refused(EngineError, "engine.state", what="a training pass"):
        engine.forward_backward_batch(data, support.Loss())


@check("ENG-072", page=_LIFE)
def a_folder_without_a_model_is_refused(subject: Subject) -> None:
    """A model folder that is missing or unusable makes ``initialize`` raise EngineError ``engine.model``."""
    empty, weightless = subject.folder / "empty", subject.folder / "weightless"
    for folder in (empty, weightless):
        folder.mkdir()
    shutil.copy(support.model_folder() / "config.json", weightless)
    for folder in (subject.folder / "absent", empty, weightless):
        engine = subject.make(support.context_of(subject, folder))
        try:
            with refused(EngineError, "engine.model", what=f"initialize with a model folder that is {folder.name}"):
                engine.initialize()
        finally:
            engine.close()


@check("ENG-073", page=_LIFE, using=support.opened)
def one_rank_is_its_whole_layout(subject: Subject, engine: BaseEngine) -> None:
    """A single rank is data-parallel rank 0 of 1, and its results count."""
    layout = engine.layout
    found = (layout.data_parallel_rank, layout.data_parallel_size, layout.is_output_rank)
    assert found == (0, 1, True), f"the layout of a single rank is {found}, expected (0, 1, True)"


@check("ENG-074", page=_LIFE)
def close_leaves_nothing(subject: Subject) -> None:
    """``close`` can be repeated and leaves no thread, process, open file, socket or shared memory behind."""

    async def life(folder: Path) -> None:
        engine = subject.make(support.context_of(subject))
        engine.initialize()
        support.train(engine)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder / "native")))
        support.weights(engine)
        engine.close()
        engine.close()

    support.model_folder()  # made before, and not by the engine
    assert_nothing_left(life, subject.folder)


@check("ENG-075", page=_LIFE, using=support.opened)
def disable_adapter_without_an_adapter_does_nothing(subject: Subject, engine: BaseEngine) -> None:
    """``disable_adapter`` has no effect on a model without an adapter."""
    wanted = support.log_probs(engine)
    with engine.disable_adapter():
        found = support.log_probs(engine)
    support.assert_tokens(wanted, found, 0.0, "log-probabilities inside of disable_adapter, without an adapter")


@check("ENG-076", page=_LIFE)
def an_engine_without_an_optimizer_infers(subject: Subject) -> None:
    """An engine without an optimizer runs forward passes and exports its weights."""
    wanted = support.expected(support.model_folder()).log_probs
    with support.opened(subject, role="reference", optimizer=None) as engine:
        support.assert_tokens(wanted, support.log_probs(engine), 1e-4, "log-probabilities of a reference")
        assert support.weights(engine), "a reference exports no weights"


_PAGE = "docs/plugins/engine.md#ranks"


@check("ENG-110", capability="multi_rank", page=_PAGE, deadline_seconds=120.0)
def ranks_change_nothing(subject: Subject) -> None:
    """Two ranks give the same gradients, norm, weights and results as one."""
    played = engine_ranks.play(subject)
    with support.opened(subject) as engine:
        output, norm = support.train(engine)
        after = support.weights(engine)
    with support.opened(subject) as engine:
        wanted = support.gradients(engine)
        found_rows = support.log_probs(engine)
    sizes = {(fact["data_parallel_size"]) for fact in played.facts}
    assert len(sizes) == 1, f"the ranks know of data-parallel sizes {sorted(sizes)}"
    ranks = {fact["data_parallel_rank"] for fact in played.facts}
    assert ranks == set(range(sizes.pop())), f"data-parallel ranks are {sorted(ranks)}"
    for rank in range(engine_ranks.RANKS):
        support.assert_close(wanted, played.tensors(rank, "gradient"), 1e-4, f"gradients on rank {rank}")
        found = played.facts[rank]["norm"]
        assert abs(norm - found) <= 1e-4 * norm, f"the gradient norm on rank {rank} is {found:g}, expected {norm:g}"
    assert output.loss is not None, "a pass with a loss function has no loss"
    loss = sum(fact["loss"] for fact in played.facts if fact["is_output_rank"])
    assert abs(output.loss - loss) <= 1e-5, f"losses of the output ranks add up to {loss:g}, expected {output.loss:g}"
    support.assert_tokens(found_rows, played.log_probs(), 1e-4, "log-probabilities of the output ranks")
    support.assert_close(after, played.tensors(0, "weight"), 1e-4, "weights after a step of two ranks")


@check("ENG-111", capability="multi_rank", page=_PAGE, deadline_seconds=120.0)
def checkpoints_of_other_numbers_of_ranks_load(subject: Subject) -> None:
    """One rank can load a checkpoint that two ranks wrote, optimizer and schedule included."""
    played = engine_ranks.play(subject)
    with support.opened(subject) as engine:
        support.train(engine)
        first = support.weights(engine)
        support.train(engine)
        second = support.weights(engine)
    with support.opened(subject, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.folder / "native")))
        loaded = support.weights(engine)
        support.assert_same_tensors(played.tensors(0, "weight"), loaded, "weights of the checkpoint of two ranks")
        support.train(engine)
        stepped = support.weights(engine)
    wanted = {name: second[name].double() - first[name].double() for name in first}
    found = {name: stepped[name].double() - loaded[name].double() for name in first}
    support.assert_close(wanted, found, 1e-2, "what the step after a checkpoint of two ranks changes")


@check("ENG-112", capability="multi_rank", page=_EXPORT, deadline_seconds=120.0)
def what_ranks_have_makes_up_the_weights(subject: Subject) -> None:
    """If ``get_local_param`` returns what a rank has of the weights, all ranks together have all of them, bit for bit,
    each name at most once and in the same boxes every time."""
    played = engine_ranks.play(subject)
    ranks = [played.local(rank) for rank in range(engine_ranks.RANKS)]
    if not any(ranks):
        return
    wanted = played.tensors(0, "weight")
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for rank, parts in enumerate(ranks):
        names = [box.name for box, _ in parts]
        assert len(names) == len(set(names)), f"rank {rank} has a name twice: {sorted(names)}"
        assert not set(names) - set(wanted), f"rank {rank} has what is not exported: {sorted(set(names) - set(wanted))}"
        assert not played.facts[rank]["boxes_change"], f"rank {rank} has other boxes in the second call"
        for box, tensor in parts:
            whole = attrs.evolve(box, start=(0,) * len(box.shape), length=box.shape)
            assert tuple(wanted[box.name].shape) == box.shape, f"{box} of rank {rank} is of another shape"
            support.assert_same_tensors({str(box): part_of(wanted[box.name], whole, box)}, {str(box): tensor}, "a part")
            part_of(seen[box.name], whole, box).fill_(True)
    lacking = [name for name, there in seen.items() if not there.all()]
    assert not lacking, f"no rank has all of {lacking[:4]}"


@check("ENG-120", tier="gpu", capability="gpu", page="docs/plugins/engine.md#devices", deadline_seconds=120.0)
def a_gpu_gives_the_numbers_of_float64(subject: Subject) -> None:
    """On a GPU log-probabilities and gradients equal the float64 reference, and results are on the CPU."""
    _need_gpu()
    wanted = support.expected(support.model_folder())
    with support.opened(subject, device="cuda") as engine:
        with engine.eval_mode():
            output = engine.forward_backward_batch(support.batch(), None, forward_only=True)
        assert output.log_probs is not None, "an inference pass of an actor has no log_probs"
        assert output.log_probs.device.type == "cpu", f"results are on {output.log_probs.device}, expected the CPU"
        support.assert_tokens(wanted.log_probs, output.log_probs, 1e-3, "log-probabilities on a GPU")
        found = support.gradients(engine)
    support.assert_close(wanted.gradients, found, 1e-3, "gradients on a GPU")


@check("ENG-121", tier="gpu", capability="gpu", page="docs/plugins/engine.md#devices", deadline_seconds=120.0)
def offloading_from_a_gpu_makes_room_and_changes_nothing(subject: Subject) -> None:
    """Moving everything to the CPU frees the GPU's memory, and moving it back changes nothing."""
    _need_gpu()
    with support.opened(subject, device="cuda") as engine, support.opened(subject, device="cuda") as other:
        for each in (engine, other):
            support.train(each)
            support.gradients(each)
        held = torch.cuda.memory_allocated()
        size = sum(tensor.nbytes for tensor in support.weights(engine).values())
        engine.to("cpu")
        freed = held - torch.cuda.memory_allocated()
        assert freed >= 3 * size, f"to('cpu') frees {freed} bytes, expected weights, gradients and moments: 4 * {size}"
        engine.to("cuda")
        for each in (engine, other):
            with each.train_mode():
                each.optimizer_step()
        support.assert_same_tensors(support.weights(other), support.weights(engine), "weights after offloading")


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise Skipped("there is no GPU here")

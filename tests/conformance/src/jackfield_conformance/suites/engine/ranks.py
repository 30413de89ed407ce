"""Checks with several ranks, each in a process of its own, and checks that need a GPU."""

from __future__ import annotations

import torch

from jackfield.abc.engine import LoadCheckpointRequest
from jackfield_conformance.registry import Skipped, check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support import engine as support
from jackfield_conformance.support import engine_ranks

_PAGE = "docs/plugins/engine.md#ranks"


@check("ENG-110", capability="multi_rank", page=_PAGE, deadline_seconds=120.0)
def ranks_change_nothing(subject: Subject) -> None:
    """Two ranks give the gradients, norm, weights and results of one: no number of ranks changes them."""
    played = engine_ranks.play(subject)
    with support.opened(subject) as engine:
        output, norm = support.train(engine, support.batch(), support.Loss())
        after = support.weights(engine)
    with support.opened(subject) as engine:
        wanted = support.gradients(engine, support.batch(), support.Loss())
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
    """A checkpoint that two ranks wrote is read by one, optimizer and schedule included."""
    played = engine_ranks.play(subject)
    data, loss = support.batch(), support.Loss()
    with support.opened(subject) as engine:
        support.train(engine, data, loss)
        first = support.weights(engine)
        support.train(engine, data, loss)
        second = support.weights(engine)
    with support.opened(subject, seed=8) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(played.folder / "native")))
        loaded = support.weights(engine)
        support.assert_same_tensors(played.tensors(0, "weight"), loaded, "weights of the checkpoint of two ranks")
        support.train(engine, data, loss)
        stepped = support.weights(engine)
    wanted = {name: second[name].double() - first[name].double() for name in first}
    found = {name: stepped[name].double() - loaded[name].double() for name in first}
    support.assert_close(wanted, found, 1e-2, "what the step after a checkpoint of two ranks changes")


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
        found = support.gradients(engine, support.batch(), support.Loss())
    support.assert_close(wanted.gradients, found, 1e-3, "gradients on a GPU")


@check("ENG-121", tier="gpu", capability="gpu", page="docs/plugins/engine.md#devices", deadline_seconds=120.0)
def offloading_from_a_gpu_makes_room_and_changes_nothing(subject: Subject) -> None:
    """Moving everything to the CPU frees the GPU's memory, and back again nothing has changed."""
    _need_gpu()
    data, loss = support.batch(), support.Loss()
    with support.opened(subject, device="cuda") as engine, support.opened(subject, device="cuda") as other:
        for each in (engine, other):
            support.train(each, data, loss)
            with each.train_mode():
                each.optimizer_zero_grad()
                each.forward_backward_batch(data, loss)
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

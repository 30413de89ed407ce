"""The suite of checkpoint engines: the invariants of ``jackfield.abc.checkpoint_engine``, on running transfers.

Both sides are made in this process and run on one event loop; a transport between machines has to work on loopback,
too. A plugin's fixture may hold ``settings``, ``bucket_settings`` (a list of settings under which buckets are tiny,
small and large; not needed by a plugin with a setting ``bucket_bytes``) and ``silence_seconds`` (how long the deadline
is where a peer is silent, default 0.5).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Generator
from contextlib import aclosing, suppress
from pathlib import Path

import torch

from jackfield.abc.checkpoint_engine import CheckpointEngineContext, Topology, TopologyRequest
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt, WorkerReceipt
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import HeldWeights, WeightReceiver
from jackfield.weights import Replica, WeightSender, WeightSynchronizer
from jackfield_conformance.registry import Capability, check
from jackfield_conformance.subject import Subject
from jackfield_conformance.support import checkpoint_engine as support
from jackfield_conformance.support.leaks import assert_nothing_left, other_tasks

CAPABILITIES: dict[str, Capability] = {
    "delta": Capability(what="moves changed blocks to workers that hold the version before"),
    "gpu": Capability(what="moves tensors of a GPU"),
    "retains_weights": Capability(what="keeps the newest weights for workers that come when a transfer is over"),
    "multi_host": Capability(what="works between machines"),
}

_TENSORS = "docs/plugins/checkpoint_engine.md#tensors"
_ORDER = "docs/plugins/checkpoint_engine.md#order-of-calls"
_BREAKS = "docs/plugins/checkpoint_engine.md#failures"
_DELTAS = "docs/plugins/checkpoint_engine.md#deltas"
_TOPOLOGY = "docs/plugins/checkpoint_engine.md#topology"

Weights = Generator[tuple[str, torch.Tensor], None, None]


# -- tensors -----------------------------------------------------------------------------------------------------------


async def _arrive(subject: Subject, tensors: dict[str, torch.Tensor], workers: int = 1) -> None:
    async with support.ends(subject, workers) as made:
        for worker, found in enumerate(await support.sync(made, tensors)):
            support.assert_received(tensors, found, f"worker {worker}")


@check("CKE-010", page=_TENSORS)
async def every_tensor_arrives_once(subject: Subject) -> None:
    """Every tensor arrives exactly once and bit-exact."""
    await _arrive(subject, support.numbers())


@check("CKE-011", page=_TENSORS)
async def every_dtype_arrives(subject: Subject) -> None:
    """Tensors of every dtype arrive bit-exact, NaN, infinities and negative zeros included."""
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.5, -3.25])
    tensors = {str(dtype): special.to(dtype) for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    whole = torch.tensor([0, 1, 2, 100, 127])
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        tensors[str(dtype)] = whole.to(dtype)
    tensors["torch.bool"] = torch.tensor([True, False, True])
    for name in ("float8_e4m3fn", "float8_e5m2"):
        tensors[name] = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
    await _arrive(subject, tensors)


@check("CKE-012", page=_TENSORS)
async def every_shape_arrives(subject: Subject) -> None:
    """Scalars, empty tensors and tensors of many dimensions arrive with their shapes."""
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (1,), (1, 1, 1), (2, 3, 4, 5), (7,))
    await _arrive(subject, {f"shape {list(shape)}": torch.full(shape, 1.5) for shape in shapes})


@check("CKE-013", page=_TENSORS)
async def strided_tensors_arrive(subject: Subject) -> None:
    """Tensors that are not contiguous arrive with the values that they show."""
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    tensors = {
        "transposed": base.T,
        "every second column": base[:, ::2],
        "a part from the middle": base[2:4, 3:7],
        "permuted": base.view(2, 3, 10).permute(2, 0, 1),
    }
    async with support.ends(subject) as made:
        topology = await made.prepare()
        sending = support.send(made, topology, [support.source(tensors)])
        found = await made.together(sending, support.receive(made.workers[0], topology.rollout[0]))
    support.assert_received(tensors, found)


@check("CKE-014", page=_TENSORS)
async def any_bucket_size_will_do(subject: Subject) -> None:
    """Every tensor arrives whatever the bucket size, tensors larger than a bucket included."""
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{size}": torch.randn(size, generator=generator) for size in (1, 16, 17, 15, 250, 3, 251, 5000, 1, 2)}
    for settings in support.bucket_settings(subject):
        async with support.ends(subject, **settings) as made:
            (found,) = await support.sync(made, tensors)
        support.assert_received(tensors, found, f"with {settings or 'the plugin as it is'}")


@check("CKE-015", page=_TENSORS)
async def many_tiny_tensors_arrive(subject: Subject) -> None:
    """Many tiny tensors arrive: an adapter's, or a model of many layers."""
    await _arrive(subject, {f"layer.{index}.lora_A.weight": torch.full((2,), float(index)) for index in range(700)})


@check("CKE-016", page=_TENSORS)
async def every_worker_gets_everything(subject: Subject) -> None:
    """Each of several workers gets every tensor."""
    await _arrive(subject, support.numbers(), workers=3)


@check("CKE-017", page=_TENSORS)
async def a_tensor_is_valid_until_the_next_is_drawn(subject: Subject) -> None:
    """A received tensor keeps its values until the next one is drawn, however slow its receiver is."""
    tensors = support.numbers(8)

    async def dawdle(name: str) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    settings = support.bucket_settings(subject)
    for each in (settings[0], settings[-1]):
        async with support.ends(subject, workers=2, **each) as made:
            for found in await support.sync(made, tensors, meanwhile=dawdle):
                support.assert_received(tensors, found, "at a slow receiver")


@check("CKE-018", page=_TENSORS)
async def the_sender_does_not_count_on_memory_of_the_generator(subject: Subject) -> None:
    """A tensor whose memory is written over as soon as the next but one is drawn arrives as it was."""
    wanted = {f"step {index}": torch.full((6, 5), float(index)) for index in range(12)}
    buffers = torch.empty(2, 6, 5)

    def reused() -> Weights:
        for (name, tensor), buffer in zip(wanted.items(), itertools.cycle(buffers)):
            yield name, buffer.copy_(tensor)

    for settings in support.bucket_settings(subject):
        async with support.ends(subject, workers=2, **settings) as made:
            topology = await made.prepare()
            found = await made.together(
                support.send(made, topology, [reused()]),
                support.receive_all(made, topology),
            )
        for each in found:
            support.assert_received(wanted, each, "from memory that is used again")


# -- order of calls ----------------------------------------------------------------------------------------------------


@check("CKE-020", page=_ORDER)
async def transfers_repeat(subject: Subject) -> None:
    """The same objects make one transfer after the other, each with its own version and values."""
    async with support.ends(subject, workers=2) as made:
        for version in (1, 2, 5):
            tensors = support.numbers(4, seed=version)
            for found in await support.sync(made, tensors, version):
                support.assert_received(tensors, found, f"version {version}")


@check("CKE-021", page=_ORDER)
async def workers_may_change_between_transfers(subject: Subject) -> None:
    """A sender meets another number of workers, new ones, at its next transfer."""
    tensors = support.numbers(4)
    async with support.ends(subject, workers=3) as made:
        await support.sync(made, tensors, 1)
        for version, count in ((2, 1), (3, 4)):
            async with support.ends(subject, workers=count) as others:
                made.workers = others.workers
                for found in await support.sync(made, tensors, version):
                    support.assert_received(tensors, found, f"one of {count} new workers")


@check("CKE-022", page=_ORDER)
async def an_empty_transfer_ends(subject: Subject) -> None:
    """A transfer without any tensor ends at both sides."""
    async with support.ends(subject, workers=2) as made:
        assert await support.sync(made, {}) == [{}, {}], "tensors arrived that were not sent"


@check("CKE-023", page=_ORDER)
async def every_rank_exhausts_its_generator(subject: Subject) -> None:
    """Every trainer rank exhausts its generator, and still each tensor arrives once."""
    tensors, drawn = support.numbers(), [0, 0]

    def counting(rank: int) -> Weights:
        for pair in support.source(tensors):
            yield pair
            drawn[rank] += 1

    async with support.ends(subject, workers=2, ranks=2) as made:
        topology = await made.prepare()
        found = await made.together(
            support.send(made, topology, [counting(0), counting(1)]), support.receive_all(made, topology)
        )
    for each in found:
        support.assert_received(tensors, each, "from two trainer ranks")
    assert drawn == [len(tensors)] * 2, f"of {len(tensors)} tensors the ranks have drawn {drawn}"


@check("CKE-024", page=_ORDER)
async def transfers_side_by_side_do_not_mix(subject: Subject) -> None:
    """Two transfers at the same time, of an actor and a critic, do not mix."""
    one = support.numbers(5, seed=1)
    other = {f"critic.{name}": tensor for name, tensor in support.numbers(9, seed=2).items()}
    async with support.ends(subject) as actor, support.ends(subject) as critic:
        (first,), (second,) = await asyncio.gather(support.sync(actor, one), support.sync(critic, other))
    support.assert_received(one, first, "of the first of two transfers")
    support.assert_received(other, second, "of the second of two transfers")


@check("CKE-025", page=_ORDER)
async def another_version_is_refused(subject: Subject) -> None:
    """A receiver of another version than its sender's raises WeightsError rather than take the tensors."""
    async with support.ends(subject, seconds=support.BREAK_SECONDS, worker_seconds=support.BREAK_SECONDS) as made:
        topology = await made.prepare()
        made.start(support.send(made, topology, [support.source(support.numbers())], 2))
        receiving = support.receive(made.workers[0], topology.rollout[0], 1)
        error = await support.bounded(
            support.BREAK_SECONDS, receiving, "receiving version 1 from a sender of version 2"
        )
        assert isinstance(error, support.BREAKS), f"the receiver raised {error!r}, expected a WeightsError"
        await made.finalize()


@check("CKE-026", page=_ORDER)
async def finalize_can_be_repeated(subject: Subject) -> None:
    """``finalize`` can be repeated, and comes before anything else without harm."""
    async with support.ends(subject) as made:
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
        await made.prepare()
        for _ in range(2):
            await made.trainers[0].finalize()
        (found,) = await support.sync(made, support.numbers())
        for _ in range(2):
            await made.trainers[0].finalize()
            await made.workers[0].finalize()
    support.assert_received(support.numbers(), found, "after several finalize")


# -- failures ----------------------------------------------------------------------------------------------------------


class _Broken(Exception):
    """What a training engine raises while it exports."""


def _breaking(tensors: dict[str, torch.Tensor]) -> Weights:
    yield from list(tensors.items())[:3]
    raise _Broken("the export fails")


@check("CKE-030", page=_BREAKS)
async def a_failing_sender_ends_its_receivers(subject: Subject) -> None:
    """When the weights' generator raises, the sender raises and every receiver raises within the deadline."""
    for settings in support.bucket_settings(subject)[:2]:
        async with support.ends(
            subject, 2, seconds=support.BREAK_SECONDS, worker_seconds=support.BREAK_SECONDS, **settings
        ) as made:
            topology = await made.prepare()
            receiving = [
                made.start(support.receive(*pair)) for pair in zip(made.workers, topology.rollout, strict=True)
            ]
            sending = support.send(made, topology, [_breaking(support.numbers())])
            await support.bounded(support.BREAK_SECONDS, sending, "a sender whose generator raises")
            await made.finalize()
            for worker, task in enumerate(receiving):
                error = await support.bounded(
                    support.BREAK_SECONDS, task, f"worker {worker} of a sender whose generator raises"
                )
                assert isinstance(error, support.BREAKS), f"worker {worker} raised {error!r}, expected a WeightsError"


@check("CKE-031", page=_BREAKS)
async def a_receiver_that_leaves_breaks_the_transfer(subject: Subject) -> None:
    """When a receiver fails half-way and finalizes, the sender raises within the deadline."""

    async def fail(engine: object, arguments: object) -> None:
        receiver = WeightReceiver(engine)  # type: ignore[arg-type]
        async with aclosing(receiver.tensors(arguments, 1)) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                raise OSError("the worker's disk is full")

    async with support.ends(subject, 2, seconds=support.BREAK_SECONDS, worker_seconds=support.BREAK_SECONDS) as made:
        topology = await made.prepare()
        failing = made.start(fail(made.workers[1], topology.rollout[1]))
        other = made.start(support.receive(made.workers[0], topology.rollout[0]))
        sending = support.send(made, topology, [support.source(support.numbers(60))])
        error = await support.bounded(support.BREAK_SECONDS, sending, "sending to a receiver that fails")
        assert isinstance(error, support.BREAKS), f"the sender raised {error!r}, expected a WeightsError"
        error = await support.bounded(support.BREAK_SECONDS, failing, "the receiver that fails")
        assert isinstance(error, OSError), f"the receiver raised {error!r}, expected its own OSError"
        await made.finalize()
        with suppress(AssertionError):
            await support.bounded(support.BREAK_SECONDS, other, "the receiver beside the one that fails")


def _names(error: BaseException, worker: int) -> bool:
    """Whether a message names a worker by its number (times and the numbers of the transfer aside)."""
    return re.search(rf"(?<![\w.-]){worker}(?![\w.]|-\w)", re.sub(r"[\d.]+ s\b", "", str(error))) is not None


@check("CKE-032", page=_BREAKS)
async def a_silent_receiver_is_named(subject: Subject) -> None:
    """A receiver that connects and then takes nothing makes the sender raise within the deadline, with its number."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, 3, seconds=seconds) as made:
        topology = await made.prepare()
        for worker in (0, 1):
            made.start(support.receive(made.workers[worker], topology.rollout[worker]))
        silent = WeightReceiver(made.workers[2]).tensors(topology.rollout[2], 1)
        drawing = made.start(anext(silent))
        sending = support.send(made, topology, [support.source(support.numbers(60))])
        error = await support.bounded(seconds, sending, "sending to a receiver that takes nothing")
        assert isinstance(error, support.BREAKS), f"the sender raised {error!r}, expected DeadlineExceeded"
        assert _names(error, 2), f"the error does not name worker 2: {error}"
        await made.finalize()
        await support.ended([drawing])
        await silent.aclose()


@check("CKE-033", page=_BREAKS)
async def a_receiver_that_never_comes_is_named(subject: Subject) -> None:
    """A receiver that never connects makes the sender raise DeadlineExceeded within the deadline, with its number."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, 3, seconds=seconds) as made:
        topology = await made.prepare()
        for worker in (0, 1):
            made.start(support.receive(made.workers[worker], topology.rollout[worker]))
        sending = support.send(made, topology, [support.source(support.numbers())])
        error = await support.bounded(seconds, sending, "sending to a receiver that never comes")
        assert isinstance(error, DeadlineExceeded), f"the sender raised {error!r}, expected DeadlineExceeded"
        assert _names(error, 2), f"the error does not name worker 2: {error}"
        await made.finalize()


@check("CKE-034", page=_BREAKS)
async def a_silent_sender_is_named(subject: Subject) -> None:
    """A sender that never sends makes its receivers raise DeadlineExceeded within the deadline, naming it."""
    seconds = support.silence_seconds(subject)
    async with support.ends(subject, worker_seconds=seconds) as made:
        topology = await made.prepare()
        receiving = support.receive(made.workers[0], topology.rollout[0])
        error = await support.bounded(seconds, receiving, "receiving from a sender that never sends")
    assert isinstance(error, DeadlineExceeded), f"the receiver raised {error!r}, expected DeadlineExceeded"
    named = re.search(r"sender|trainer|rank", str(error))
    assert named, f"the error does not name the sender (or trainer, or rank): {error}"


@check("CKE-035", page=_BREAKS)
async def a_sender_that_goes_ends_its_receivers(subject: Subject) -> None:
    """A sender that finalizes without having sent everything makes its receivers raise within the deadline."""
    async with support.ends(subject, 2, seconds=support.BREAK_SECONDS, worker_seconds=support.BREAK_SECONDS) as made:
        topology = await made.prepare()
        receiving = [made.start(support.receive(*pair)) for pair in zip(made.workers, topology.rollout, strict=True)]
        for _ in range(10):
            await asyncio.sleep(0)
        await made.finalize()
        for worker, task in enumerate(receiving):
            error = await support.bounded(support.BREAK_SECONDS, task, f"worker {worker} of a sender that goes")
            assert isinstance(error, support.BREAKS), f"worker {worker} raised {error!r}, expected a WeightsError"


@check("CKE-036", page=_BREAKS)
async def transfers_go_on_after_a_failure(subject: Subject) -> None:
    """After a transfer broke off and both sides finalized, the same objects make the next one."""
    async with support.ends(subject) as made:
        topology = await made.prepare()
        receiving = made.start(support.receive(made.workers[0], topology.rollout[0]))
        with suppress(Exception):
            await support.within(
                support.BREAK_SECONDS,
                support.send(made, topology, [_breaking(support.numbers())]),
                "a sender that raises",
            )
        await made.finalize()
        await support.ended([receiving])
        (found,) = await support.sync(made, support.numbers(seed=9), 2)
    support.assert_received(support.numbers(seed=9), found, "after a transfer that broke off")


# -- topology ----------------------------------------------------------------------------------------------------------


@check("CKE-040", page=_TOPOLOGY)
async def metadata_and_topology_are_plain(subject: Subject) -> None:
    """Metadata and topology are plain values that come back from JSON as they were."""
    async with support.ends(subject, workers=2) as made:
        made.prepared = True
        prepared = await made.senders[0].prepare()
        request = TopologyRequest(trainer_metadata=(prepared.metadata,), rollout_workers=2)
        topology = made.cls.build_topology(request)
        for what, value in (("metadata", prepared.metadata), ("topology", [*topology.trainer, *topology.rollout])):
            try:
                back = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise AssertionError(f"the {what} does not fit into JSON: {error}; it is {value!r}") from error
            assert back == value, f"the {what} comes back from JSON as {back!r}, it was {value!r}"


@check("CKE-041", page=_TOPOLOGY)
async def the_topology_counts_ranks_and_workers(subject: Subject) -> None:
    """The topology has one share per trainer rank and one per inference worker."""
    for ranks, workers in ((1, 1), (2, 3), (1, 5)):
        async with support.ends(subject, workers, ranks) as made:
            topology: Topology = await made.prepare()
        found = (len(topology.trainer), len(topology.rollout))
        assert found == (ranks, workers), f"shares for {found}, expected {ranks} ranks and {workers} workers"


class _Worker:
    """A rollout server of two workers, as far as a synchronisation needs one."""

    def __init__(self, subject: Subject, replica: int) -> None:
        self._subject = subject
        self._replica = replica

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        receipts = []
        for worker, arguments in enumerate(request.connect):
            context = CheckpointEngineContext(
                end="receiver",
                rank=2 * self._replica + worker,
                world_size=4,
                deadline_seconds=support.PATIENCE_SECONDS,
            )
            receipts.append(self._load(worker, self._subject.make(context), arguments, request.version))
        done = tuple(await asyncio.gather(*receipts))
        return WeightReceipt(version=request.version, replica=self._replica, workers=done)

    @staticmethod
    async def _load(worker: int, engine: object, arguments: object, version: int) -> WorkerReceipt:
        found = await support.receive(engine, arguments, version)  # type: ignore[arg-type]
        return WorkerReceipt(worker=worker, digests={name: digest(tensor) for name, tensor in found.items()})


@check("CKE-042", page=_TOPOLOGY)
async def a_synchronisation_is_proved(subject: Subject) -> None:
    """The core's coordinator brings two versions to two replicas of two workers, with receipts that prove them."""
    version = 0
    replicas = [Replica(_Worker(subject, number), ServerInfo(replica=number, workers=2)) for number in (0, 1)]  # type: ignore[arg-type]
    async with support.ends(subject, workers=0) as made:
        sender = WeightSender(made.trainers[0], lambda: (support.source(support.numbers(seed=version)), None))
        seconds = support.PATIENCE_SECONDS
        coordinator = WeightSynchronizer([sender], replicas, subject.name, Clock(), deadline_seconds=seconds)
        for version in (1, 2):
            report = await coordinator.sync(version)
            wanted = {name: digest(tensor) for name, tensor in support.numbers(seed=version).items()}
            for receipt in report.receipts:
                for worker in receipt.workers:
                    assert worker.digests == wanted, f"worker {worker.worker} has loaded other values of {version}"


# -- deltas ------------------------------------------------------------------------------------------------------------


@check("CKE-045", capability="delta", page=_DELTAS)
async def deltas_arrive(subject: Subject) -> None:
    """Changed blocks bring workers from version to version, bit for bit; a version without a change, too."""
    tensors = {**support.numbers(), "half": torch.zeros(2000, dtype=torch.bfloat16)}
    held = [HeldWeights(), HeldWeights()]
    async with support.ends(subject, workers=2) as made:
        made.senders = [WeightSender(engine, block_bytes=64) for engine in made.trainers]
        for version in range(1, 5):
            if version == 2:
                tensors["half"][::700] = 1.5  # three blocks, the last one of them short
                tensors["layer.1.weight"][3, 3] += 1
            if version == 4:
                tensors["layer.2.weight"] = tensors["layer.2.weight"] + 1
            found = await support.sync_delta(made, tensors, held, version)
            wanted = {name: digest(tensor) for name, tensor in tensors.items()}
            for worker, digests in enumerate(found):
                wrong = sorted(name for name in wanted if digests.get(name) != wanted[name])
                assert not wrong, f"worker {worker} holds other values of {wrong[:4]} after version {version}"


# -- who comes late ----------------------------------------------------------------------------------------------------


@check("CKE-046", capability="retains_weights", page=_TOPOLOGY)
async def who_comes_late_gets_the_newest(subject: Subject) -> None:
    """A worker that comes late gets every tensor when the transfer is over, be it one without any worker."""
    async with support.ends(subject, workers=0) as made, support.ends(subject, workers=2) as late:
        for version in (1, 2):
            tensors, topology = support.numbers(seed=version), await made.prepare()
            assert topology.retained is not None, "the topology has no connect arguments for those who come late"
            await support.send(made, topology, [support.source(tensors) for _ in made.senders], version)
            await made.finalize()
            for number, worker in enumerate(late.workers):
                found = await support.receive(worker, topology.retained, version)
                support.assert_received(tensors, found, f"worker {number}, late for version {version}")


# -- what is left ------------------------------------------------------------------------------------------------------


@check("CKE-050", page="docs/plugins/checkpoint_engine.md#what-is-left")
def transfers_leave_nothing(subject: Subject) -> None:
    """After ``finalize`` no task, thread, process, open file, socket or shared memory is left."""

    async def life(folder: Path) -> list[str]:
        async with support.ends(subject, workers=2) as made:
            await support.sync(made, support.numbers())
        await _settle()
        return other_tasks()

    assert_nothing_left(life, subject.folder)


@check("CKE-051", page="docs/plugins/checkpoint_engine.md#what-is-left")
def failures_leave_nothing(subject: Subject) -> None:
    """After a transfer that broke off and ``finalize`` nothing is left, either."""

    async def life(folder: Path) -> list[str]:
        async with support.ends(
            subject, 2, seconds=support.BREAK_SECONDS, worker_seconds=support.BREAK_SECONDS
        ) as made:
            topology = await made.prepare()
            for pair in zip(made.workers, topology.rollout, strict=True):
                made.start(support.receive(*pair))
            with suppress(Exception):
                sending = support.send(made, topology, [_breaking(support.numbers())])
                await support.within(support.BREAK_SECONDS + support.GRACE_SECONDS, sending, "a sender that raises")
        await _settle()
        return other_tasks()

    assert_nothing_left(life, subject.folder)


async def _settle() -> None:
    """Let callbacks run that are due: closing a connection takes a few turns of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)

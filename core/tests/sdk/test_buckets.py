"""Tensors are read from a byte buffer unchanged and without a copy."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from jackfield.sdk.buckets import Bucket, Layout, aligned, digest, entry_of, put, raw, views  # noqa: E402

TENSORS = {
    "strided": torch.arange(12.0).view(3, 4).T,
    "bf16": torch.randn(5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "fp8": torch.arange(7, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "one element of a column": torch.arange(6).view(2, 3)[:1, 1:2],
}


def test_a_buffer_holds_tensors_of_every_kind() -> None:
    buffer, offset, entries = torch.zeros(1024, dtype=torch.uint8), 0, []
    for name, tensor in TENSORS.items():
        entry = entry_of(name, tensor, offset)
        put(buffer, entry, tensor)
        entries.append(entry)
        offset = aligned(offset + tensor.nbytes)
    for entry in json.loads(json.dumps(entries)):
        ((_, found),) = views(buffer, [entry])
        assert digest(TENSORS[entry[0]]) == digest(found)
        if found.numel():
            assert buffer.data_ptr() <= found.data_ptr() < buffer.data_ptr() + 1024


def test_all_tensors_of_a_buffer_are_the_single_ones() -> None:
    """This holds for any offset of the buffer in its storage and any end of the buffer."""
    buffer, offset, entries = torch.zeros(2048, dtype=torch.uint8)[64:1000], 0, []
    for name, tensor in TENSORS.items():
        entries.append(entry_of(name, tensor, offset))
        put(buffer, entries[-1], tensor)
        offset = aligned(offset + tensor.nbytes)
    for end in (offset, offset - 1, 936):
        part = buffer[:end]
        found = dict(views(part, entries))
        assert {name: digest(tensor) for name, tensor in TENSORS.items()} == {n: digest(t) for n, t in found.items()}


def test_a_tensor_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="48 bytes at 100 do not fit into a buffer of 128"):
        put(torch.zeros(128, dtype=torch.uint8), entry_of("a", torch.ones(12), 100), torch.ones(12))


@pytest.mark.parametrize("name", TENSORS)
def test_raw_bytes_are_the_tensor_in_row_major_order(name: str) -> None:
    tensor = TENSORS[name]
    assert digest(tensor) == digest(next(views(raw(tensor), [entry_of(name, tensor)]))[1])


def test_raw_bytes_of_a_contiguous_tensor_are_not_copied() -> None:
    tensor = torch.arange(6.0)
    assert tensor.data_ptr() == raw(tensor).data_ptr()


def entries(*names: str) -> list[list[object]]:
    return [[name, "float32", [2, 3], 64 * number] for number, name in enumerate(names)]


def exchanged(sender: Layout, workers: list[Layout], buckets: list[list[list[object]]]) -> list[object]:
    """One transfer: what the sender tells of each bucket. Every worker learns the same entries."""
    sender.begin(all(worker.name == sender.name for worker in workers))
    for worker in workers:
        worker.begin(shared=True)
    told = [sender.announced(bucket) for bucket in buckets]
    for worker in workers:
        assert buckets == [worker.learned(each) for each in told]
    name = sender.end()
    for worker in workers:
        worker.end(name)
    return told


def test_a_bucket_is_described_once_as_long_as_it_does_not_change() -> None:
    sender, workers = Layout(), [Layout(), Layout()]
    buckets = [entries("a", "b"), entries("c")]
    assert buckets == exchanged(sender, workers, buckets)
    assert [None, None] == exchanged(sender, workers, buckets)
    buckets = [entries("a", "b"), entries("d"), entries("e")]
    assert [None, entries("d"), entries("e")] == exchanged(sender, workers, buckets)
    assert [None] == exchanged(sender, workers, buckets[:1])
    assert [None, entries("d")] == exchanged(sender, workers, buckets[:2])


def test_a_worker_that_missed_a_transfer_is_told_everything() -> None:
    sender, early, late = Layout(), Layout(), Layout()
    buckets = [entries("a"), entries("b")]
    exchanged(sender, [early], buckets)
    assert buckets == exchanged(sender, [early, late], buckets)
    assert [None, None] == exchanged(sender, [early, late], buckets)
    exchanged(sender, [late], [entries("c")])
    assert buckets == exchanged(sender, [early, late], buckets)


def test_a_transfer_that_breaks_off_changes_nothing() -> None:
    sender, worker = Layout(), Layout()
    buckets = [entries("a"), entries("b")]
    exchanged(sender, [worker], buckets)
    sender.begin(shared=True)
    worker.begin(shared=True)
    worker.learned(sender.announced(entries("c")))
    assert [None, None] == exchanged(sender, [worker], buckets)


def test_views_of_a_kept_buffer_are_made_once() -> None:
    """In each transfer they show what the buffer has by then. Those of other memory, or of a new buffer, are new."""
    entries = [entry_of("a", torch.zeros(3)), entry_of("b", torch.zeros(2, 2, dtype=torch.int16), 64)]
    bucket, buffer = Bucket(1, Layout().learned(entries), None), torch.zeros(128, dtype=torch.uint8)

    def received(content: torch.Tensor, *buffers: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(bucket.tensors(content, buffers))

    first = received(buffer, torch.zeros(1), buffer)
    buffer[:12].view(torch.float32).fill_(2.5)
    again = received(buffer, buffer)
    assert all(again[name] is tensor for name, tensor in first.items())
    assert [2.5] * 3 == again["a"].tolist()
    other = torch.ones_like(buffer)
    for found in (received(other, other), received(other), received(buffer)):
        assert ["a", "b"] == list(found)
        assert not any(found[name] is tensor for name, tensor in first.items())
    assert [[257, 257]] * 2 == received(other, other)["b"].tolist()

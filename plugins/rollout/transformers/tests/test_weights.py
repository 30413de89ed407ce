"""New weights between decode steps: what is loaded, what is refused, what the tokens say."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import peft
import pytest
import torch

from jackfield.abc.rollout import AbortRequest, GenerateResult, PauseRequest, ResumeRequest, SleepRequest, WakeUpRequest
from jackfield.errors import RolloutError, WeightsError
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import Blocks, delta_of
from jackfield_rollout_transformers.model import rounded
from jackfield_testing import refused

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft

PROMPT = (9, 8, 7, 6, 5, 4)


async def take(stream: Any, count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


def forward_log_probs(model: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[float]:
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def greedy(make_request: Any, name: str, count: int = 12) -> Any:
    return make_request(name, PROMPT, temperature=0, max_new_tokens=count, ignore_eos=True)


def test_the_next_token_uses_the_new_weights(
    serve: Any, make_request: Any, send: Any, named_weights: Any, reference: Any, other_model: Any
) -> None:
    """A request in flight keeps its cache: from the update on, its tokens are the new model's over the old model's keys
    and values, and carry the new version."""

    async def main() -> tuple[GenerateResult, GenerateResult]:
        async with serve() as server:
            stream = server.generate_stream(make_request("a", PROMPT, seed=3, max_new_tokens=20, ignore_eos=True))
            running = asyncio.create_task(
                server.generate(make_request("b", PROMPT, seed=4, max_new_tokens=20, ignore_eos=True))
            )
            await take(stream, 6)
            receipt = await server.update_weights(send(7, named_weights(other_model)))
            assert (receipt.version, receipt.replica, (await server.health()).weight_version) == (7, 0, 7)
            assert 0 < receipt.paused_seconds <= receipt.seconds
            await take(stream, 14)
            return await running, await server.generate(make_request("c", PROMPT, seed=5, max_new_tokens=8))

    mixed, new = asyncio.run(main())
    before = mixed.weight_versions.count(0)
    assert (0,) * before + (7,) * (20 - before) == mixed.weight_versions
    assert 6 <= before < 20
    expected = mixed_cache_log_probs(reference, other_model, mixed.token_ids, before)
    assert expected == pytest.approx(list(mixed.log_probs), abs=1e-5)
    assert forward_log_probs(reference, PROMPT, mixed.token_ids)[before:] != pytest.approx(expected[before:], abs=1e-2)
    assert {7} == set(new.weight_versions)
    assert forward_log_probs(other_model, PROMPT, new.token_ids) == pytest.approx(list(new.log_probs), abs=1e-5)


def mixed_cache_log_probs(old: Any, new: Any, tokens: tuple[int, ...], before: int) -> list[float]:
    """The library's own cache: the old model up to the input of token ``before``, the new one from there."""
    with torch.no_grad():
        first = old(torch.tensor([[*PROMPT, *tokens[: before - 1]]]), use_cache=True)
        second = new(torch.tensor([tokens[before - 1 : -1]]), past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat((first.logits[0, len(PROMPT) - 1 :], second.logits[0]))
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_the_receipt_proves_what_is_loaded(serve: Any, send: Any, named_weights: Any, other_model: Any) -> None:
    """Digests of the parameters as they lie in the model; a cast tensor's is that of what came."""
    weights = named_weights(other_model)
    weights["model.norm.weight"] = weights["model.norm.weight"].double()

    async def main() -> Any:
        async with serve() as server:
            receipt = await server.update_weights(send(1, weights))
            held = dict(server._model.module.named_parameters())
            return receipt, {name: digest(held[name]) for name in weights}

    receipt, held = asyncio.run(main())
    (worker,) = receipt.workers
    assert {name: digest(tensor) for name, tensor in weights.items()} == dict(worker.digests)
    del held["model.norm.weight"]
    assert held.items() <= worker.digests.items()


@pytest.mark.parametrize("tied_name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_arrive_under_either_name(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any, tied_name: str
) -> None:
    """One tensor fills both places."""
    weights = named_weights(other_model)
    weights[tied_name] = weights.pop("model.embed_tokens.weight")

    async def main() -> GenerateResult:
        async with serve() as server:
            await server.update_weights(send(1, weights))
            return await server.generate(greedy(make_request, "a"))

    result = asyncio.run(main())
    assert forward_log_probs(other_model, PROMPT, result.token_ids) == pytest.approx(list(result.log_probs), abs=1e-5)


def spoil(weights: dict[str, torch.Tensor], how: str) -> Any:
    """Tensors as a list for the queue, with one thing wrong; the name that the error must say."""
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del weights[name]
    elif how == "unknown":
        name = "model.layers.9.mlp.up_proj.weight"
        weights[name] = torch.zeros(1)
    elif how == "shape":
        weights[name] = weights[name].T
    items: list[Any] = list(weights.items())
    if how == "broken":
        name = "cable cut"
        items.insert(5, OSError(name))
    return items, name


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("missing", "weights.missing"),
        ("unknown", "weights.missing"),
        ("shape", "weights.transfer"),
        ("broken", "weights.transfer"),
    ],
)
def test_a_wrong_update_stops_the_replica(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any, how: str, code: str
) -> None:
    """The error names it; what was unfinished fails as stale; nothing is served until an update succeeds."""
    items, name = spoil(named_weights(other_model), how)

    async def main() -> None:
        async with serve() as server:
            stream = server.generate_stream(make_request("a", PROMPT, max_new_tokens=100, ignore_eos=True))
            await take(stream, 2)
            with refused(("weights.missing", "weights.transfer"), name) as caught:
                await server.update_weights(send(1, items))
            assert code == caught.value.code
            with pytest.raises(RolloutError) as stale:
                await take(stream, 100)
            assert stale.value.code == "rollout.stale"
            with pytest.raises(RolloutError) as stale:
                await server.generate(greedy(make_request, "b"))
            assert stale.value.code == "rollout.stale"
            health = await server.health()
            assert (health.healthy, health.running, health.weight_version) == (False, 0, 0)
            await server.update_weights(send(1, named_weights(other_model)))
            result = await server.generate(greedy(make_request, "b"))
            assert (await server.health()).healthy
            log_probs = forward_log_probs(other_model, PROMPT, result.token_ids)
            assert log_probs == pytest.approx(list(result.log_probs), abs=1e-5)

    asyncio.run(main())


def test_versions_never_go_backwards(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """An older version is refused; the same again, and a newer one, are not."""
    weights = named_weights(other_model)

    async def main() -> None:
        async with serve() as server:
            await server.update_weights(send(5, weights))
            await server.update_weights(send(5, weights))
            with pytest.raises(WeightsError) as caught:
                await server.update_weights(send(4, weights))
            assert caught.value.code == "weights.version"
            with pytest.raises(RolloutError) as caught:
                await server.generate(greedy(make_request, "a"))
            assert "rollout.stale" == caught.value.code
            await server.update_weights(send(6, weights))
            assert (await server.generate(greedy(make_request, "a", 2))).weight_versions == (6, 6)

    asyncio.run(main())


def test_a_sender_who_falls_silent(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """The update ends at its deadline, naming what it waited for, and the replica is stale."""

    async def main() -> None:
        async with serve() as server:
            request = send(1, dict(list(named_weights(other_model).items())[:3]), complete=False, deadline_seconds=0.05)
            with refused("weights.transfer", "version 1") as caught:
                await server.update_weights(request)
            assert caught.value.code == "weights.transfer"
            with pytest.raises(RolloutError):
                await server.generate(greedy(make_request, "a"))

    asyncio.run(main())


def test_stop_ends_an_update(serve: Any, send: Any, named_weights: Any, other_model: Any) -> None:
    """A server can be stopped while it waits for tensors; the update fails with ``rollout.stopped``."""

    async def main() -> None:
        async with serve() as server:
            update = asyncio.create_task(server.update_weights(send(1, named_weights(other_model), complete=False)))
            await asyncio.sleep(0)
            await server.stop()
            with pytest.raises(RolloutError) as caught:
                await update
            assert caught.value.code == "rollout.stopped"

    asyncio.run(main())


def test_a_cancelled_update_leaves_the_replica_stale(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """Half the tensors are in: nobody may generate with them."""

    async def main() -> None:
        async with serve() as server:
            request = send(1, dict(list(named_weights(other_model).items())[:3]), complete=False)
            queue = request.connect[0]["queue"]
            update = asyncio.create_task(server.update_weights(request))
            while not queue.empty():
                await asyncio.sleep(0)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update
            with pytest.raises(RolloutError) as caught:
                await server.generate(greedy(make_request, "a"))
            assert caught.value.code == "rollout.stale"

    asyncio.run(main())


def test_a_delta_changes_weights_that_were_cast(
    serve: Any, make_request: Any, other_model: Any, named_weights: Any, send: Any
) -> None:
    """Blocks of float32 change a copy of what was sent; the bfloat16 parameter is cast from it anew."""
    weights = named_weights(other_model)
    name = "model.layers.1.mlp.up_proj.weight"
    changed = weights[name].clone()
    changed[3, 4] += 1e-4  # less than bfloat16 shows of most values, more than a digest forgives
    changed[7] *= 2
    part = delta_of(name, changed, Blocks.of(weights[name], 64), Blocks.of(changed, 64), 64)
    assert part is not None

    async def main() -> None:
        async with serve(dtype="bfloat16") as server:
            await server.update_weights(send(1, weights, deltas_follow=True))
            receipt = await server.update_weights(send(2, dict([part]), kind="delta", base_version=1))
            wanted = {each: digest(tensor) for each, tensor in {**weights, name: changed}.items()}
            assert wanted == receipt.workers[0].digests
            assert torch.equal(changed.bfloat16(), server._weights.targets()[name].data)
            result = await server.generate(greedy(make_request, "a", 1))
            assert (2,) == result.weight_versions

    asyncio.run(main())


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.05), ("float8_e4m3fn", 0.5)])
def test_weights_are_cast_where_they_are_loaded(
    serve: Any, make_request: Any, other_model: Any, named_weights: Any, send: Any, dtype: str, allowed: float
) -> None:
    """The receipt proves the float32 that was sent; the parameters are those that the dtype has for it."""
    weights = named_weights(other_model)

    def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if dtype == "bfloat16" or "_proj" not in name:
            return tensor.bfloat16()
        scale = tensor.abs().max() / 448
        return ((tensor / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()

    async def main() -> GenerateResult:
        async with serve(dtype=dtype) as server:
            receipt = await server.update_weights(send(1, weights))
            assert {name: digest(tensor) for name, tensor in weights.items()} == receipt.workers[0].digests
            loaded = server._weights.targets()
            assert all(torch.equal(cast(name, tensor), loaded[name].data) for name, tensor in weights.items())
            result: GenerateResult = await server.generate(greedy(make_request, "a"))
            return result

    result = asyncio.run(main())
    exact = forward_log_probs(other_model, PROMPT, result.token_ids)
    distances = [abs(one - other) for one, other in zip(result.log_probs, exact, strict=True)]
    assert 0 < sum(distances) / len(distances) < allowed


def test_the_first_weights_are_cast_too(serve: Any, other_model: Any) -> None:
    """A tensor without any value but zero keeps it; an adapter has nothing that it could be merged into."""
    zero = torch.zeros(3, 4)
    assert torch.equal(zero, rounded(zero))
    values = torch.tensor([-448.0, 447.0, 1.0, 1.0625, 1e-9])
    assert [-448.0, 448.0, 1.0, 1.0, 0.0] == rounded(values).tolist()

    async def main() -> None:
        async with serve(dtype="float8_e4m3fn") as server:
            assert 21 == len(server._model.float8)
            for name in server._model.float8:
                weight = server._weights.targets()[name].data
                assert torch.equal(weight, rounded(weight).bfloat16()), name
                assert len(weight.unique()) < 256, name

    asyncio.run(main())


def lora_model(model: Any, seed: int, **changes: Any) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """A PEFT model with a random adapter, its config as plain values, its tensors under PEFT's names."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "up_proj"]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **(settings | changes))
    adapted = peft.get_peft_model(model, config).eval()
    tensors = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    return adapted, config.to_dict(), tensors


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}}]
)
def test_an_adapter_equals_peft(serve: Any, make_request: Any, make_model: Any, send: Any, changes: Any) -> None:
    """Merged log-probabilities are the PEFT model's; a second adapter replaces the first, on other layers, too."""
    first, first_config, first_tensors = lora_model(make_model(0), 1, **changes)
    second, second_config, second_tensors = lora_model(make_model(0), 2, target_modules=["v_proj", "q_proj"])

    async def main() -> list[GenerateResult]:
        results = []
        async with serve() as server:
            for version, (config, tensors) in enumerate(
                ((first_config, first_tensors), (second_config, second_tensors)), start=1
            ):
                request = send(version, tensors, kind="adapter", peft_config=config)
                receipt = await server.update_weights(request)
                assert {name: digest(tensor) for name, tensor in tensors.items()} == dict(receipt.workers[0].digests)
                results.append(await server.generate(greedy(make_request, "a")))
        return results

    results = asyncio.run(main())
    for adapted, result in zip((first, second), results, strict=True):
        expected = forward_log_probs(adapted, PROMPT, result.token_ids)
        assert expected == pytest.approx(list(result.log_probs), abs=1e-4)
        base = forward_log_probs(make_model(0), PROMPT, result.token_ids)
        assert base != pytest.approx(expected, abs=1e-2)


def test_full_and_adapter_updates_take_turns(
    serve: Any, make_request: Any, make_model: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """An adapter is merged into the weights of the latest full update; a full update removes the adapter."""
    adapted, config, tensors = lora_model(make_model(1), 3)

    async def main() -> list[GenerateResult]:
        results = []
        async with serve() as server:
            await server.update_weights(send(1, tensors, kind="adapter", peft_config=config))
            await server.update_weights(send(2, named_weights(other_model)))
            results.append(await server.generate(greedy(make_request, "a")))
            await server.update_weights(send(3, tensors, kind="adapter", peft_config=config))
            results.append(await server.generate(greedy(make_request, "a")))
        return results

    full, merged = asyncio.run(main())
    assert forward_log_probs(other_model, PROMPT, full.token_ids) == pytest.approx(list(full.log_probs), abs=1e-5)
    assert forward_log_probs(adapted, PROMPT, merged.token_ids) == pytest.approx(list(merged.log_probs), abs=1e-4)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("half", "layers.0.self_attn.q_proj.lora_A"),
        ("layer", "layers.1.self_attn.q_proj"),
        ("unknown", "layers.7.self_attn.q_proj"),
        ("shape", "layers.2.mlp.up_proj"),
        ("config", "bias"),
        ("none", "PEFT config"),
    ],
)
def test_wrong_adapters_are_refused(serve: Any, make_model: Any, send: Any, how: str, word: str) -> None:
    """Halves, missing layers, strange names, wrong shapes, variants of LoRA that are not LoRA."""
    _, config, tensors = lora_model(make_model(0), 1)
    prefix = "base_model.model.model.layers"
    if how == "half":
        del tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"]
    elif how == "layer":
        tensors = {name: tensor for name, tensor in tensors.items() if f"{prefix}.1.self_attn.q_proj" not in name}
    elif how == "unknown":
        tensors[f"{prefix}.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    elif how == "shape":
        tensors[f"{prefix}.2.mlp.up_proj.lora_B.weight"] = torch.zeros(4, 4)
    elif how == "config":
        config["bias"] = "all"
    else:
        config = {}

    async def main() -> None:
        async with serve() as server:
            with pytest.raises(WeightsError) as caught:
                await server.update_weights(send(1, tensors, kind="adapter", peft_config=config))
            assert word in str(caught.value)
            assert not (await server.health()).healthy

    asyncio.run(main())


def test_an_adapter_needs_its_base(
    serve: Any, make_model: Any, send: Any, named_weights: Any, reference: Any, make_request: Any
) -> None:
    """After a deep sleep, or half a full update, the base is gone: only a full update helps."""
    adapted, config, tensors = lora_model(make_model(0), 1)

    async def main() -> GenerateResult:
        async with serve() as server:
            await server.pause(PauseRequest())
            await server.sleep(SleepRequest(level=2))
            with pytest.raises(WeightsError) as caught:
                await server.update_weights(send(1, named_weights(reference)))
            assert "weights.transfer" == caught.value.code
            await server.wake_up(WakeUpRequest())
            await server.resume(ResumeRequest())
            with pytest.raises(WeightsError) as caught:
                await server.update_weights(send(1, tensors, kind="adapter", peft_config=config))
            assert "weights.transfer" == caught.value.code
            await server.update_weights(send(1, named_weights(reference)))
            await server.update_weights(send(2, tensors, kind="adapter", peft_config=config))
            return await server.generate(greedy(make_request, "a"))

    result = asyncio.run(main())
    assert forward_log_probs(adapted, PROMPT, result.token_ids) == pytest.approx(list(result.log_probs), abs=1e-4)


def test_an_update_reaches_all_who_wait(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """Paused before the update, requests that run and that wait both go on after it; the budget of tokens is one."""

    async def main() -> list[GenerateResult]:
        async with serve(max_batch_size=1) as server:
            stream = server.generate_stream(make_request("a", PROMPT, seed=1, max_new_tokens=10, ignore_eos=True))
            await take(stream, 3)
            late = asyncio.create_task(server.generate(greedy(make_request, "late", 4)))
            await server.pause(PauseRequest())
            await server.update_weights(send(1, named_weights(other_model)))
            await server.resume(ResumeRequest())
            chunks = [chunk async for chunk in stream]
            assert sum(len(chunk.token_ids) for chunk in chunks) == 10 - 3
            return [await late]

    (late,) = asyncio.run(main())
    assert late.weight_versions == (1, 1, 1, 1)
    assert forward_log_probs(other_model, PROMPT, late.token_ids) == pytest.approx(list(late.log_probs), abs=1e-5)


def test_an_update_waits_for_one_pass_of_many_prompts(
    serve: Any, make_request: Any, send: Any, named_weights: Any, other_model: Any
) -> None:
    """Prompts that take several passes: those that come after the update are computed with the new weights alone."""

    async def main() -> list[GenerateResult]:
        async with serve(max_prefill_tokens=1) as server:
            module, forward = server._model.module, server._model.module.forward
            loop, first_pass, update_is_in = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def watched(*args: Any, **kwargs: Any) -> Any:
                loop.call_soon_threadsafe(first_pass.set)
                assert update_is_in.wait(30)
                return forward(*args, **kwargs)

            module.forward = watched
            requests = [make_request(n, PROMPT[n:], seed=n, max_new_tokens=4, ignore_eos=True) for n in range(4)]
            running = asyncio.gather(*map(server.generate, requests))
            await first_pass.wait()
            update = asyncio.create_task(server.update_weights(send(1, named_weights(other_model))))
            while not server._loop._visitors:
                await asyncio.sleep(0)
            update_is_in.set()
            await update
            return list(await running)

    *late, first = asyncio.run(main())  # the shortest prompt comes first
    assert first.weight_versions == (0, 1, 1, 1)
    for number, result in enumerate(late):
        assert result.weight_versions == (1, 1, 1, 1)
        expected = forward_log_probs(other_model, PROMPT[number:], result.token_ids)
        assert expected == pytest.approx(list(result.log_probs), abs=1e-5)


def test_a_caller_who_leaves_before_its_prompt_is_computed(serve: Any, make_request: Any) -> None:
    """While an abort ends the passes over prompts early; nothing is left of the request, and the others go on."""

    async def main() -> list[GenerateResult]:
        async with serve(max_prefill_tokens=1) as server:
            module, forward = server._model.module, server._model.module.forward
            loop, first_pass, abort_is_in = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def watched(*args: Any, **kwargs: Any) -> Any:
                loop.call_soon_threadsafe(first_pass.set)
                assert abort_is_in.wait(30)
                return forward(*args, **kwargs)

            module.forward = watched
            requests = [make_request(n, PROMPT[n:], max_new_tokens=4 if n else 60, ignore_eos=True) for n in range(4)]
            tasks = [asyncio.create_task(server.generate(request)) for request in requests]
            await first_pass.wait()
            tasks[0].cancel()
            abort = asyncio.create_task(server.abort(AbortRequest(request_ids=("1",))))
            while not server._loop._visitors:
                await asyncio.sleep(0)
            abort_is_in.set()
            assert (await abort).request_ids == ("1",)
            results = list(await asyncio.gather(*tasks[1:]))
            assert tasks[0].cancelled()
            health = await server.health()
            assert (health.running, health.waiting) == (0, 0)
            return results

    assert [0, 4, 4] == [len(result.token_ids) for result in asyncio.run(main())]

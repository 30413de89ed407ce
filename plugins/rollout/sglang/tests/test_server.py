"""The client's logic, on a server that speaks SGLang's protocol: nothing here says what SGLang itself does."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from jackfield.abc.rollout import AbortRequest, PauseRequest, ResumeRequest, SleepRequest, WakeUpRequest
from jackfield.errors import EngineError, JackfieldError, PluginError, RolloutError, WeightsError
from jackfield_architectures import save_model
from jackfield_conformance.support.rollout_model import model_folder
from jackfield_huggingface.shaping import ShapedRequest, Shaping
from jackfield_testing import in_loop

from .conftest import Serve, make_request, sync, weights_of
from .fake_sglang import SLOW


@pytest.fixture
def mixture(tmp_path: Path) -> str:
    """A model of three layers, whose second has no experts."""
    folder = tmp_path / "mixture"
    save_model("qwen3_moe", folder, num_hidden_layers=3, mlp_only_layers=[1], layer_types=["full_attention"] * 3)
    return str(folder)


@in_loop
async def test_tokens_come_with_log_probs_and_versions(serve: Serve) -> None:
    """Whole or as a stream; what SGLang is told means what the request says."""
    async with serve() as server:
        result = await server.generate(make_request("a", max_new_tokens=3, temperature=0.7, stop_token_ids=(9,)))
        assert ((100,) * 3, (0.0,) * 3, (0,) * 3, "length") == (
            result.token_ids, result.log_probs, result.weight_versions, result.finish_reason
        )  # fmt: skip
        chunks = [chunk async for chunk in server.generate_stream(make_request("b", max_new_tokens=2))]
        assert [((100,), None), ((100,), None), ((), "length")] == [(c.token_ids, c.finish_reason) for c in chunks]
        first, second = server.fake.bodies("/generate")
        told = first["sampling_params"]
        assert ([5, 6], 3, 0.7, [9], -1, True) == (
            first["input_ids"], told["max_new_tokens"], told["temperature"], told["stop_token_ids"], told["top_k"],
            told["no_stop_trim"],
        )  # fmt: skip
        assert told["sampling_seed"] != second["sampling_params"]["sampling_seed"]


@in_loop
async def test_an_update_in_the_middle_of_a_request_asks_for_the_rest_with_the_new_weights(serve: Serve) -> None:
    """One budget of tokens, and each token knows its weights; what SGLang has read is what was sent."""
    async with serve() as server:
        tensors = weights_of(server)
        for _ in range(2):
            server.fake.steps.put_nowait(None)
        stream = server.generate_stream(make_request("slow", SLOW, max_new_tokens=5))
        early = [await anext(stream), await anext(stream)]
        report = await sync(server, 3, tensors)
        for _ in range(3):
            server.fake.steps.put_nowait(None)
        late = [chunk async for chunk in stream]
        versions = [version for chunk in (*early, *late) for version in chunk.weight_versions]
        assert ([0, 0, 3, 3, 3], "length") == (versions, late[-1].finish_reason)
        assert [-3.0] * 3 == [value for chunk in late for value in chunk.log_probs]
        first, second = server.fake.bodies("/generate")
        assert ([SLOW, 100, 100], 3) == (second["input_ids"], second["sampling_params"]["max_new_tokens"])
        assert first["sampling_params"]["sampling_seed"] == second["sampling_params"]["sampling_seed"]
        assert set(tensors) == set(server.fake.loaded)
        assert all(torch.equal(tensor, server.fake.loaded[name]) for name, tensor in tensors.items())
        assert report.receipts[0].seconds >= report.receipts[0].paused_seconds
        assert not server.fake.paused


@in_loop
async def test_weights_that_sglang_does_not_load_leave_it_stale(serve: Serve) -> None:
    async with serve() as server:
        server.fake.refuses["/update_weights_from_disk"] = "no such tensor"
        with pytest.raises(WeightsError) as caught:
            await sync(server, 1, weights_of(server))
        assert "no such tensor" in str(caught.value.found)
        with pytest.raises(RolloutError) as stale:
            await server.generate(make_request("a"))
        assert "rollout.stale" == stale.value.code
        del server.fake.refuses["/update_weights_from_disk"]
        await sync(server, 1, weights_of(server))
        assert (1,) == (await server.generate(make_request("a", max_new_tokens=1))).weight_versions


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_half_a_model_is_not_shown_to_sglang(serve: Serve, fault: str) -> None:
    async def main() -> None:
        async with serve() as server:
            tensors = weights_of(server)
            name = next(each for each in tensors if "q_proj" in each)
            if fault == "shape":
                tensors[name] = tensors[name][1:]
            else:
                tensor = tensors.pop(name)
                tensors |= {"model.nowhere": tensor} if fault == "unknown" else {}
            with pytest.raises(WeightsError) as caught:
                await sync(server, 1, tensors)
            assert ("nowhere" if fault == "unknown" else name) in str(caught.value)
            assert [] == server.fake.bodies("/update_weights_from_disk")
            assert not (await server.health()).healthy

    asyncio.run(main())


@in_loop
async def test_what_a_folder_holds_beside_the_model_is_not_waited_for(serve: Serve, tmp_path: Path) -> None:
    """Layers that predict further tokens, buffers of old checkpoints: no engine loads and publishes them."""
    folder = Path(shutil.copytree(model_folder(), tmp_path / "model"))
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    extra = (
        f"model.layers.{layers}.eh_proj.weight",
        f"model.layers.{layers}.mlp.down_proj.weight",
        "mtp.layers.0.fc.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attn.masked_bias",
    )
    save_file({name: torch.ones(2, 2) for name in extra}, folder / "more.safetensors")
    tensors = load_file(folder / "model.safetensors")
    async with serve(folder=str(folder)) as server:
        report = await sync(server, 1, tensors)
        assert tensors.keys() == report.receipts[0].workers[0].digests.keys()
        half = {name: tensor for name, tensor in tensors.items() if f"layers.{layers - 1}." not in name}
        with pytest.raises(JackfieldError) as caught:
            await sync(server, 2, half)
        assert "parameters did not come" in str(caught.value)


@in_loop
async def test_an_adapter_is_served_by_name_and_replaced(serve: Serve) -> None:
    async with serve(lora=True) as server:
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        adapter = {
            f"{prefix}.lora_A.default.weight": torch.ones(2, 4),
            f"{prefix}.lora_B.default.weight": torch.ones(4, 2),
        }
        for version in (1, 2):
            await sync(server, version, adapter, {"r": 2, "lora_alpha": 4, "target_modules": {"q_proj"}})
            assert f"jackfield-{version}" == server.fake.adapter
        assert f"{prefix}.lora_A.weight" in server.fake.loaded
        assert {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} == server.fake.loaded["config"]
        await server.generate(make_request("a", max_new_tokens=1))
        assert "jackfield-2" == server.fake.bodies("/generate")[0]["lora_path"]
        await sync(server, 3, weights_of(server))
        assert server.fake.adapter is None
        assert {"--enable-lora", "--max-lora-rank"} <= set(server.arguments)


@in_loop
async def test_a_pause_takes_requests_out_and_resume_asks_again(serve: Serve) -> None:
    async with serve() as server:
        server.fake.steps.put_nowait(None)
        stream = server.generate_stream(make_request("slow", SLOW, max_new_tokens=2))
        await anext(stream)
        assert 1 == (await server.pause(PauseRequest())).running
        waiting = asyncio.create_task(server.generate(make_request("new", max_new_tokens=1)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.05)
        server.fake.steps.put_nowait(None)
        await server.resume(ResumeRequest())
        assert "length" == [chunk async for chunk in stream][-1].finish_reason
        assert (100,) == (await waiting).token_ids


@in_loop
async def test_what_is_aborted_keeps_its_tokens(serve: Serve) -> None:
    """By request, by a pause, and by whoever leaves: SGLang is told."""
    async with serve() as server:
        for name, end in (
            ("first", server.abort(AbortRequest())),
            ("second", server.pause(PauseRequest(mode="abort"))),
        ):
            server.fake.steps.put_nowait(None)
            stream = server.generate_stream(make_request(name, SLOW, max_new_tokens=4))
            chunks = [await anext(stream)]
            await end
            chunks += [chunk async for chunk in stream]
            assert ([100], "abort") == ([t for c in chunks for t in c.token_ids], chunks[-1].finish_reason)
        await server.resume(ResumeRequest())
        task = asyncio.create_task(server.generate(make_request("third", SLOW)))
        while len(server.fake.bodies("/generate")) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert "3-third" == server.fake.bodies("/abort_request")[-1]["rid"]
        assert 0 == (await server.health()).running


@in_loop
async def test_memory_is_given_back_and_taken(serve: Serve) -> None:
    async with serve() as server:
        await server.sleep(SleepRequest(level=1))
        assert ("weights",) == (await server.wake_up(WakeUpRequest(tags=("weights",)))).awake
        await sync(server, 1, weights_of(server))
        await server.wake_up(WakeUpRequest())
        assert [["weights", "kv_cache"]] == [each["tags"] for each in server.fake.bodies("/release_memory_occupation")]
        assert [["weights"], ["kv_cache"]] == [each["tags"] for each in server.fake.bodies("/resume_memory_occupation")]
        await server.sleep(SleepRequest(level=2))
        await server.wake_up(WakeUpRequest())
        with pytest.raises(RolloutError) as caught:
            await server.generate(make_request("a"))
        assert "rollout.stale" == caught.value.code


@pytest.mark.parametrize(
    "sampling",
    [
        {"log_probs": "raw", "temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5000},
    ],
)
def test_log_probs_that_sglang_does_not_compute_are_refused(serve: Serve, sampling: dict[str, Any]) -> None:
    async def main() -> None:
        async with serve() as server:
            with pytest.raises(PluginError) as caught:
                await server.generate(make_request("a", **sampling))
            assert "plugin.capability" == caught.value.code
            assert [] == server.fake.asked

    asyncio.run(main())


@in_loop
async def test_filtered_log_probs_are_those_of_what_was_drawn_from(serve: Serve) -> None:
    async with serve() as server:
        result = await server.generate(make_request("a", max_new_tokens=2, top_k=5, top_p=0.9))
        assert (-0.25, -0.25) == result.log_probs
        (body,) = server.fake.bodies("/generate")
        assert (True, "selected") == (body["return_sampling_mask"], body["sampling_logprobs_mode"])


@in_loop
async def test_experts_are_those_of_the_layers_that_have_some(serve: Serve, mixture: str) -> None:
    """SGLang returns a row for every layer and the whole request, also after an interruption."""
    async with serve(folder=mixture, router_replay=True) as server:
        assert "--enable-return-routed-experts" in server.arguments
        result = await server.generate(make_request("a", 5, 6, 8, max_new_tokens=2))
        found, every = result.routed_experts, np.arange(4 * 3 * 2).reshape(4, 3, 2)
        assert np.int16 == found.dtype
        assert every[:, (0, 2)].tolist() == found.tolist()
        server.fake.steps.put_nowait(None)
        waiting = asyncio.create_task(server.generate(make_request("slow", SLOW, max_new_tokens=2)))
        while not server.fake._drawn.get("2-slow"):
            await asyncio.sleep(0)
        await server.pause(PauseRequest())
        await server.resume(ResumeRequest())
        server.fake.steps.put_nowait(None)
        assert (2, 2, 2) == (await waiting).routed_experts.shape
        server.fake.experts = (5, 1)
        with pytest.raises(RolloutError) as caught:
            await server.generate(make_request("b", max_new_tokens=1))
        assert ("rollout.failed", "10 numbers") == (caught.value.code, caught.value.found)


@in_loop
async def test_experts_are_not_asked_for_without_need(serve: Serve, mixture: str) -> None:
    async with serve(folder=mixture) as server:
        assert (await server.generate(make_request("a", max_new_tokens=1))).routed_experts is None
        assert "--enable-return-routed-experts" not in server.arguments
        assert "return_routed_experts" not in server.fake.bodies("/generate")[0]


def test_a_model_without_experts_is_refused(serve: Serve) -> None:
    async def main() -> None:
        async with serve(router_replay=True):
            pass

    with pytest.raises(EngineError) as caught:
        asyncio.run(main())
    assert ("engine.model", "model.router_replay") == (caught.value.code, caught.value.where)


@in_loop
async def test_what_sglang_refuses_is_told(serve: Serve) -> None:
    async with serve() as server:
        server.fake.refuses["/generate"] = "too long"
        with pytest.raises(JackfieldError) as caught:
            await server.generate(make_request("a"))
        assert "rollout.failed" == caught.value.code
        assert "too long" in str(caught.value.found)
        with pytest.raises(RolloutError) as refused:
            await server.generate(make_request("b", 10**6))
        assert "rollout.request" == refused.value.code


@in_loop
async def test_stop_ends_what_waits(serve: Serve) -> None:
    async with serve() as server:
        task = asyncio.create_task(server.generate(make_request("slow", SLOW)))
        while not server.fake.asked:
            await asyncio.sleep(0)
        await server.stop()
        with pytest.raises(RolloutError) as caught:
            await task
        assert "rollout.stopped" == caught.value.code


@in_loop
async def test_clients_of_openai_are_served(serve: Serve) -> None:
    """What SGLang is told is what they say, and what it cannot do is refused."""
    async with serve(openai={}) as server:
        assert server.info is not None
        async with openai.AsyncOpenAI(base_url=server.info.openai_base_url, api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"frequency_penalty": 0.5, "logit_bias": {"7": -1}}
            fields["extra_body"] = {"min_tokens": 2, "repetition_penalty": 1.1, "structured_outputs": {"regex": "a+"}}
            stream = await client.completions.create(model="any", prompt=[5, 6], max_tokens=4, **fields, stream=True)
            pieces = [each async for each in stream]
            assert [None, None, None, None, "length"] == [piece.choices[0].finish_reason for piece in pieces]
            (body,) = server.fake.bodies("/generate")
            told = body["sampling_params"]
            assert (0.5, 1.1, 2, {"7": -1.0}, "a+") == (
                told["frequency_penalty"], told["repetition_penalty"], told["min_new_tokens"], told["logit_bias"],
                told["regex"],
            )  # fmt: skip
            assert "presence_penalty" not in told
            for name, value in (("prompt_logprobs", 1),):
                with pytest.raises(openai.BadRequestError, match=f"{name} is not served by this server") as caught:
                    await client.completions.create(model="any", prompt=[5, 6], extra_body={name: value})
                assert ("unsupported_parameter", name) == (caught.value.code, caught.value.param)


@in_loop
async def test_an_update_ends_a_request_that_needs_one_whole_answer(serve: Serve) -> None:
    """Penalties count the answer's own tokens, and a later part would begin to count again."""
    async with serve() as server:
        asked = make_request("slow", SLOW, max_new_tokens=5)
        request = ShapedRequest(
            request_id="slow", prompt_ids=(SLOW,), sampling=asked.sampling, shaping=Shaping(presence_penalty=1.0)
        )
        server.fake.steps.put_nowait(None)
        stream = server.generate_stream(request)
        await anext(stream)
        await sync(server, 3, weights_of(server))
        with pytest.raises(RolloutError) as caught:
            await anext(stream)
        assert ("rollout.stale", "slow") == (caught.value.code, caught.value.where)

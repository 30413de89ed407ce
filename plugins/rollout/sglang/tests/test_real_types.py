"""Everything that this plugin asks, asked of SGLang's own routes and types: see ``real_types.py``.

The environment: ``make interpreters``. Without it the test is skipped. It says that SGLang understands the
requests; what it does then, only a GPU can say.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.rollout import AbortRequest, PauseRequest, ResumeRequest, SleepRequest, WakeUpRequest
from jackfield_architectures import save_model
from jackfield_huggingface.shaping import Grammar, ShapedRequest, Shaping
from jackfield_testing import sglang_python

from .conftest import Serve, make_request, sync, weights_of
from .fake_sglang import SLOW

HERE = Path(__file__).parent
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
READ = (
    "model_path",
    "dtype",
    "random_seed",
    "max_running_requests",
    "tp_size",
    "enable_lora",
    "max_lora_rank",
    "enable_return_routed_experts",
    "port",
)


async def everything(serve: Serve, mixture: Path) -> dict[str, Any]:
    """Have the plugin ask all that it can ask."""
    save_model("qwen3_moe", mixture)
    async with serve(folder=str(mixture), router_replay=True) as server:
        server.fake.experts = (2, 2)
        await server.generate(make_request("routed", max_new_tokens=2))
        (routed,) = server.fake.bodies("/generate")
        flag = next(each for each in server.arguments if "experts" in each)
    async with serve(lora=True) as server:
        await server.generate(make_request("plain", max_new_tokens=2, stop=("end",), stop_token_ids=(3,)))
        await server.generate(make_request("greedy", max_new_tokens=2, temperature=0.0, top_k=9))
        await server.generate(make_request("filtered", max_new_tokens=2, top_k=9, top_p=0.5, min_p=0.1, seed=1 << 62))
        plain = make_request("shaped", max_new_tokens=2)
        shaping = Shaping(
            frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={3: -1.0}, min_tokens=1,
            grammar=Grammar("regex", "a+"),
        )  # fmt: skip
        await server.generate(
            ShapedRequest(request_id="shaped", prompt_ids=(5, 6), sampling=plain.sampling, shaping=shaping)
        )
        stream = server.generate_stream(make_request("streamed", SLOW))
        server.fake.steps.put_nowait(None)
        await anext(stream)
        await server.pause(PauseRequest())
        await server.resume(ResumeRequest())
        await server.abort(AbortRequest())
        await server.sleep(SleepRequest())
        await server.wake_up(WakeUpRequest())
        adapter = {f"{PREFIX}.lora_A.weight": torch.ones(2, 4), f"{PREFIX}.lora_B.weight": torch.ones(4, 2)}
        for version in (1, 2):
            await sync(server, version, adapter, {"r": 2, "lora_alpha": 4})
        await server.generate(make_request("adapted", max_new_tokens=2))
        await sync(server, 3, weights_of(server))
        arguments, asked = [*server.arguments, flag], [*server.fake.asked, ("/generate", routed)]
        return {"arguments": arguments, "asked": asked, "read": READ, "vocabulary": server._vocabulary}


@pytest.mark.shared_interpreter
@pytest.mark.needs("sglang")
@pytest.mark.timeout(240)  # SGLang takes half a minute to import on a busy machine
def test_sglang_understands_what_it_is_asked(serve: Serve, tmp_path: Path) -> None:
    wanted = asyncio.run(everything(serve, tmp_path / "mixture"))
    done = subprocess.run(
        [str(sglang_python()), str(HERE / "real_types.py")],
        input=json.dumps(wanted), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-3000:]
    (_, _, _, parsed), *answers = json.loads(done.stdout.splitlines()[-1])
    told = dict(zip(wanted["arguments"], wanted["arguments"][1:], strict=False))
    assert [told["--model-path"], "float32", 0, 256, 1, True, 2, True, int(told["--port"])] == [
        parsed[name] for name in READ
    ]
    assert [path for path, _ in wanted["asked"]] == [path for path, *_ in answers]
    assert [] == [answer for answer in answers if answer[1] != 200]
    types = {path: name for path, _, name, _ in answers if name != "NoneType"}
    assert {
        "/generate": "GenerateReqInput",
        "/pause_generation": "PauseGenerationReqInput",
        "/continue_generation": "ContinueGenerationReqInput",
        "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
        "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
        "/load_lora_adapter": "LoadLoRAAdapterReqInput",
        "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
        "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    } == types
    notes = [note for path, _, _, note in answers if path == "/generate"]
    assert "2 tokens, 2 more, top_k 1073741824, experts" == notes.pop()
    plain = "2 tokens, 2 more, top_k 1073741824"
    assert [plain, "2 tokens, 2 more, top_k 1", "2 tokens, 2 more, top_k 9", plain] == notes[:4]
    assert {"/flush_cache", "/abort_request"} <= {path for path, *_ in answers}

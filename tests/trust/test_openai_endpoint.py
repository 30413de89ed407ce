"""An address that speaks OpenAI's API under attack: what clients do wrong is theirs, and harms no other request."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, GenerateResult, RolloutContext, SamplingParams
from jackfield.errors import RolloutError
from jackfield.plugins import load_plugin
from jackfield_commands import CommandServer

pytestmark = pytest.mark.timeout(180)

ENDLESS = 1_000_000
LONG = tuple(range(2, 34))
SECONDS = 60.0


class Served:
    """A replica with an address, on an event loop of its own; the contract and the wire are what a test sees."""

    def __init__(self, model: Path, **openai_settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        plugin: Any = load_plugin("rollout", "transformers")
        self.server = self.call(self._made(plugin, model, openai_settings))
        self.info = self.call(self.server.start())
        place = urlsplit(self.info.openai_base_url)
        self.address = (str(place.hostname), int(place.port or 0))

    @staticmethod
    async def _made(plugin: Any, model: Path, openai_settings: Any) -> Any:
        return plugin.build({"openai": openai_settings}, RolloutContext(model=ModelSpec(path=str(model))))

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.submit(work).result(SECONDS)

    def generate(self, name: str, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> GenerateResult:
        result: GenerateResult = self.call(self.server.generate(request(name, prompt, **sampling)))
        return result

    def post(self, body: Any, path: str = "/v1/completions", raw: bytes | None = None, **headers: str) -> Any:
        """``(status, body)`` of a request; a body that is not JSON is an error."""
        connection = http.client.HTTPConnection(*self.address, timeout=SECONDS)
        with contextlib.closing(connection):
            content = json.dumps(body).encode() if raw is None else raw
            connection.request("POST", path, content, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=SECONDS)

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection(*self.address, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("jackfield_rollout_" + name))

    def until(self, condition: Callable[[], bool]) -> None:
        """Ask until it holds, up to a deadline."""
        ends = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < ends, "it did not come to hold"

    def close(self) -> None:
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


def request(name: str, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt_ids=prompt, sampling=SamplingParams(**{"ignore_eos": True, "seed": 7, **sampling})
    )


@pytest.fixture(scope="module")
def model(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model with room for endless answers."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(made / "model", folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": ENDLESS}))
    return folder


@pytest.fixture(scope="module")
def poisoned(made: Path, served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model that computes no number for prompts with one of its tokens, and this token, which it does not draw."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(made / "model", folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": False}))
    drawn = served.generate("drawn", temperature=1.0, max_new_tokens=60).token_ids
    drawn += served.generate("drawn", LONG, max_new_tokens=40).token_ids
    poison = min(set(range(described["vocab_size"])) - {*drawn, *LONG})
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, poison


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    one = Served(model, model_name="policy", max_choices=64, max_body_bytes=100_000)
    yield one
    one.close()


@pytest.fixture
def neighbour(served: Served) -> Iterator[None]:
    """A request that runs all the while, again and again; each time it gets the tokens that it got alone."""
    alone = served.generate("alone", temperature=1.0, max_new_tokens=40)
    over = threading.Event()

    async def again() -> int:
        rounds = 0
        while not over.is_set() or not rounds:
            result = await served.server.generate(request(f"round-{rounds}", temperature=1.0, max_new_tokens=40))
            assert alone.token_ids == result.token_ids
            assert alone.log_probs == pytest.approx(result.log_probs, abs=1e-4)
            rounds += 1
        return rounds

    running = served.submit(again())
    yield
    over.set()
    assert running.result(SECONDS) >= 1
    assert served.call(served.server.health()).healthy


# -- what a client may say -------------------------------------------------------------------------------------------

#: Bodies beside a valid one, and the field that OpenAI's error names.
WRONG: dict[str, list[Any]] = {
    "temperature": [1e-300, 1e308, -1, -1e-9, 2.5, True, 10**400, "hot", [], 5e-324],
    "top_p": [-0.1, 1.1, 1e308, True, {}],
    "top_k": [-2, 2**70, 1.5, True],
    "min_p": [-1, 1e300, 2],
    "n": [0, -1, 129, 10**30, True, 1.5],
    "seed": [2**64, -(2**70), 1.5, True],
    "max_tokens": [0, -5, 2**31, 10**30, True],
    "stop": ["", [""], ["a"] * 5, 5, ["x" * 5000]],
    "stop_token_ids": [[-1], [2**40], [True], ["a"], [1] * 5000],
    "logprobs": [-1, 10**9, True],
    "logit_bias": [{"5": 1e308}, {"5": -101}, {"x": 1}],
    "frequency_penalty": [1e308, -3],
    "presence_penalty": [2.1],
    "best_of": [10**9],
    "minimum_weight_version": [-1, 2**80],
    "stream_options": [{"include_usage": True}],
    "model": ["another", 5],
    "prompt": [[], [[]], [-1], [10**30], [64], [True], {"a": 1}, 5, None, ["a"] * 65, [[5]] * 65],
    "tools": [[{"type": "function"}]],
    "temprature": [1],
}


def test_what_a_client_did_wrong_is_its_own_mistake(served: Served, neighbour: None) -> None:
    """Each is refused with OpenAI's form, type, code and field, while another request goes on unharmed."""
    valid = {"model": "policy", "prompt": [5, 6], "max_tokens": 2}
    for field, values in WRONG.items():
        for value in values:
            text = json.dumps({**valid, field: value}).encode()
            status, answer = served.post(None, raw=text)
            error = answer["error"]
            assert status == (404 if error["code"] == "model_not_found" else 400), (field, value, answer)
            assert "invalid_request_error" == error["type"], (field, value, answer)
            assert error["code"], (field, value, answer)
            prompts_times_n = field == "prompt" and error["param"] == "n"
            assert prompts_times_n or str(error["param"]).startswith(field), (field, value, answer)
            assert len(error["message"]) <= 2000


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'{"prompt": NaN}',
        b'{"model": "policy", "prompt": "a", "temperature": Infinity}',
        b'{"model": "policy", "prompt": "\\ud800"}',
        b'{"model": "policy", "prompt": "a", "stop": "\\udfff"}',
        b'{"model": "policy", "prompt": "a", "seed": ' + b"9" * 6000 + b"}",
        b'{"model": "policy", "prompt": ' + b"[" * 40000 + b"]" * 40000 + b"}",
        '{"model": "policy", "prompt": "a"}'.encode("utf-16"),
        b"\xff\xfe\x00",
    ],
)
def test_bytes_that_are_no_request(served: Served, raw: bytes) -> None:
    status, answer = served.post(None, raw=raw)
    assert (400, "invalid_request_error") == (status, answer["error"]["type"])


def test_the_ways_of_http(served: Served) -> None:
    """Errors of HTTP itself have OpenAI's form too."""
    assert (404, "unknown_url") == _status_and_code(served.post({}, "/v1/nothing"))
    assert (413, "request_too_large") == _status_and_code(served.post(None, raw=b" " * 200_000))
    headers = {"Content-Type": "application/json; charset=nonsense"}
    assert 200 == served.post({"model": "policy", "prompt": [5], "max_tokens": 1}, **headers)[0]
    assert 400 == served.post(None, raw=b"no gzip", **{"Content-Encoding": "gzip"})[0]


#: What OpenAI refuses of messages: field and code of its error.
WRONG_MESSAGES: list[tuple[Any, str, str]] = [
    ({"role": "wizard", "content": "a"}, ".role", "invalid_value"),
    ({"role": 5, "content": "a"}, ".role", "invalid_type"),
    ({"content": "a"}, ".role", "missing_required_parameter"),
    ("a", "", "invalid_type"),
    ({"role": "user"}, ".content", "missing_required_parameter"),
    ({"role": "user", "content": None}, ".content", "invalid_type"),
    ({"role": "user", "content": 5}, ".content", "invalid_type"),
    ({"role": "user", "content": {"text": "a"}}, ".content", "invalid_type"),
    ({"role": "user", "content": []}, ".content", "invalid_value"),
    ({"role": "user", "content": ["a"]}, ".content[0]", "invalid_type"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ".content[0]", "invalid_value"),
    ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "missing_required_parameter"),
    ({"role": "user", "content": "a", "tool_calls": []}, ".tool_calls", "unknown_parameter"),
    ({"role": "user", "content": "a", "colour": 1}, ".colour", "unknown_parameter"),
    ({"role": "user", "content": "a", "name": 5}, ".name", "invalid_type"),
    ({"role": "system", "content": None}, ".content", "invalid_type"),
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, ".tool_calls[0].type", "missing_required"),
    ({"role": "tool", "content": "5"}, ".tool_call_id", "missing_required_parameter"),
]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
#: What OpenAI takes, and answers that clients send back as they got them from servers of the field: with nulls.
RIGHT_MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "tom"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "assistant", "content": "a", "refusal": None},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]


def test_messages_have_openais_rules(served: Served) -> None:
    """Of roles, contents and tool calls; a user has none of these."""
    chat, more = "/v1/chat/completions", {"model": "policy", "max_tokens": 1}
    for message, field, code in WRONG_MESSAGES:
        status, answer = served.post({**more, "messages": [{"role": "user", "content": "a"}, message]}, chat)
        error = answer["error"]
        assert (400, "invalid_request_error") == (status, error["type"]), (message, answer)
        assert error["code"].startswith(code), (message, answer)
        assert str(error["param"]).startswith(f"messages[1]{field}"), (message, answer)
    for message in RIGHT_MESSAGES:
        status, answer = served.post({**more, "messages": [message, {"role": "user", "content": "a"}]}, chat)
        assert 200 == status, (message, answer)


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
MALFORMED = {
    "garbage": b"\x16\x03\x01 nonsense\r\n\r\n",
    "negative length": _POST + b"Content-Length: -5\r\n\r\n",
    "two lengths": _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "bad chunk": _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    "long header": _POST + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    "false gzip": _POST + b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_http(served: Served, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """OpenAI's form, a code of the guide's table, and one line of the log at most, without a traceback."""
    caplog.set_level(logging.INFO)
    with contextlib.closing(served.connect()) as wire:
        with contextlib.suppress(ConnectionError):  # the answer may come before everything is sent
            wire.sendall(MALFORMED[name])
        response = http.client.HTTPResponse(wire)
        response.begin()
        body = json.loads(response.read())
    assert 400 == response.status
    assert "application/json" == response.headers.get_content_type()
    assert "invalid_request_error" == body["error"]["type"]
    assert body["error"]["code"] in ("invalid_request", "invalid_body")
    assert len(body["error"]["message"]) < 500
    told = [record for record in caplog.records if record.name.startswith(("aiohttp", "jackfield", "asyncio"))]
    assert len(told) <= 1, told
    assert not any(record.exc_info for record in told)


def test_codes_are_those_of_the_guide(served: Served) -> None:
    """Each code that a wrong request gets is in the table, and messages speak of the client's parameters."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "openai_clients.md").read_text()
    bodies = [{"prompt": [5], "model": "policy", field: value} for field in WRONG for value in WRONG[field]]
    for body in [*bodies, {"prompt": [5], "model": "policy", "max_tokens": "1"}]:
        _, answer = served.post(None, raw=json.dumps(body).encode())
        error = answer["error"]
        assert f"`{error['code']}`" in guide, answer
        for jargon in ("[config.", "[rollout.", "sampling.", "max_new_tokens", "max_model_len", "jackfield config"):
            assert jargon not in error["message"], answer


def test_a_number_is_no_text_and_top_p_may_be_nothing(served: Served) -> None:
    """A text is no number, as for OpenAI; ``top_p: 0``, which is in OpenAI's range, keeps the likeliest token alone."""
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}
    for field in ("temperature", "top_p", "min_p", "n", "seed", "max_tokens"):
        assert (400, "invalid_type") == _status_and_code(served.post({**body, field: "1"}))
    greedy = served.post({**body, "temperature": 0})[1]["choices"][0]["token_ids"]
    assert greedy == served.post({**body, "top_p": 0, "temperature": 2})[1]["choices"][0]["token_ids"]


def _status_and_code(answered: Any) -> tuple[int, str]:
    status, answer = answered
    return status, answer["error"]["code"]


_numbers = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.sampled_from([1e-300, 2**63, -(2**63), 1e308, 0, 1])
)
_values = st.recursive(
    st.one_of(_numbers, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_known = st.sampled_from(
    [
        *("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "max_completion_tokens", "stop"),
        *("stop_token_ids", "logprobs", "ignore_eos", "stream", "stream_options", "return_token_ids", "logit_bias"),
        *("user", "messages", "prompt"),
    ]
)


@settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.dictionaries(_known, _numbers | _values, max_size=4),
    chat=st.booleans(),
    text=st.text(max_size=5),
)
def _fuzz(served: Served, fields: dict[str, Any], chat: bool, text: str) -> None:
    body: dict[str, Any] = {"model": "policy", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": [5, 6]}
    body |= fields
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int:
            body[name] = min(body[name], 3)  # else an answer is as long as the model
    if body.get("max_tokens") is None:
        body["max_tokens"] = 2
    if body.get("max_completion_tokens", 2) is None:
        del body["max_completion_tokens"]
    body["n"] = min(body["n"], 200) if type(body.get("n")) is int else body.get("n")
    connection = http.client.HTTPConnection(*served.address, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions" if chat else "/v1/completions", json.dumps(body).encode())
        response = connection.getresponse()
        content = response.read()
    assert response.status in (200, 400, 404, 413), (body, content)
    if response.status != 200:
        error = json.loads(content)["error"]
        assert ("invalid_request_error", True) == (error["type"], bool(error["code"])), (body, error)


def test_any_body_is_answered_and_harms_nobody(served: Served, neighbour: None) -> None:
    """Bodies of a seeded generator: an answer or a refusal, never a failure, and a neighbour that notices nothing."""
    _fuzz(served)


def test_openais_own_client_reads_the_errors(served: Served) -> None:
    with openai.OpenAI(base_url=served.info.openai_base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="policy", prompt="a", temperature=1e-300)
        assert ("invalid_value", "temperature", "invalid_request_error") == (
            bad.value.code, bad.value.param, bad.value.type,
        )  # fmt: skip
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="another", prompt="a")
        assert ("model_not_found", "model") == (missing.value.code, missing.value.param)
        with pytest.raises(openai.BadRequestError) as unknown:
            client.completions.create(model="policy", prompt="a", extra_body={"temprature": 1})
        assert ("unknown_parameter", "temprature") == (unknown.value.code, unknown.value.param)
        with pytest.raises(openai.BadRequestError) as many:
            client.completions.create(model="policy", prompt=[[5]] * 9, n=8, max_tokens=1)
        assert ("invalid_value", "n") == (many.value.code, many.value.param)
        assert 64 == len(client.completions.create(model="policy", prompt=[[5]] * 8, n=8, max_tokens=1).choices)


def test_a_prompt_beyond_the_models_length(made: Path) -> None:
    served = Served(made / "model")
    try:
        with openai.OpenAI(base_url=served.info.openai_base_url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(model="any", prompt=[5] * 128)
            assert ("context_length_exceeded", "prompt") == (caught.value.code, caught.value.param)
    finally:
        served.close()


# -- one row fails alone ---------------------------------------------------------------------------------------------


def test_a_row_without_numbers_fails_alone(poisoned: tuple[Path, int]) -> None:
    """The request fails by name; those beside it and the next ones get the tokens that they get alone."""
    model, poison = poisoned
    served = Served(model)
    try:
        alone = served.generate("alone", temperature=1.0, max_new_tokens=60)

        async def beside() -> Any:
            chunks = served.server.generate_stream(request("beside", temperature=1.0, max_new_tokens=60))
            tokens = list((await anext(chunks)).token_ids)
            failing = (request(f"poison-{number}", (5, poison, *range(2, 20 + number))) for number in range(3))
            failures = await asyncio.gather(*map(served.server.generate, failing), return_exceptions=True)
            async for chunk in chunks:
                tokens += chunk.token_ids
            return failures, tuple(tokens)

        failures, tokens = served.call(beside())
        for number, failure in enumerate(failures):
            assert isinstance(failure, RolloutError)
            assert ("rollout.failed", f"poison-{number}") == (failure.code, failure.where)
        assert alone.token_ids == tokens
        after = [request(f"after-{number}", temperature=1.0, max_new_tokens=60) for number in range(6)]

        async def together() -> list[GenerateResult]:
            long = served.server.generate(request("long", LONG, max_new_tokens=40))
            return list(await asyncio.gather(long, *map(served.server.generate, after)))

        for result in served.call(together())[1:]:
            assert alone.token_ids == result.token_ids
        assert served.call(served.server.health()).healthy
    finally:
        served.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 1e-300}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": True},
        {"temperature": 1e308}, {"top_p": 0.0}, {"top_p": float("nan")}, {"top_k": 2**70}, {"min_p": -1e-9},
        {"seed": 2**64}, {"max_new_tokens": 0}, {"max_new_tokens": 2**40}, {"stop": "text"}, {"stop": ("x",) * 100},
        {"stop_token_ids": (-1,)},
    ],
)  # fmt: skip
def test_an_agents_parameters_are_bounded_where_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(RolloutError) as caught:
        SamplingParams(**wrong)
    assert ("rollout.request", f"sampling.{next(iter(wrong))}") == (caught.value.code, caught.value.where)


def test_a_runs_parameters_are_bounded_before_it_starts(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = jackfield("run", *quickstart_settings("bounded", "sampling.temperature=1e-300"))
    assert 1 == done.code, done.error
    assert "config.invalid-value" in done.error
    assert "sampling.temperature" in done.error
    assert not (tmp_path / "bounded" / "metrics.jsonl").exists()


# -- who leaves, and who comes slowly --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(served: Served, stream: bool) -> None:
    """An answer that would be endless ends with the connection, streamed or not."""
    body = {"model": "policy", "prompt": [5, 6], "max_tokens": ENDLESS, "n": 3, "ignore_eos": True, "stream": stream}
    left = served.metric('requests_total{finish_reason="error"')
    content = json.dumps(body).encode()
    with served.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(content))
        client.sendall(content)
        served.until(lambda: served.metric("running") == 3)
        if stream:
            assert client.recv(1)
    served.until(lambda: served.metric("running") + served.metric("waiting") == 0)
    served.until(lambda: served.metric('requests_total{finish_reason="error"') == left + 3)


def test_slow_and_idle_connections_are_closed(model: Path) -> None:
    """A header that never ends, a body that never comes, and a connection that says nothing more."""
    served = Served(model, idle_seconds=0.5, body_seconds=0.5)
    try:
        with served.connect() as silent, served.connect() as header, served.connect() as body, served.connect() as idle:
            header.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
            body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            idle.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert _all_of(body).startswith(b"HTTP/1.1 408 ")
            assert _all_of(idle).startswith(b"HTTP/1.1 200 ")
            assert b"" == _all_of(silent)
            assert b"" == _all_of(header)
        assert 200 == served.post({"prompt": [5], "max_tokens": 1})[0]
    finally:
        served.close()


def test_connections_are_counted(model: Path) -> None:
    served = Served(model, max_connections=3)
    try:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(served.connect()) for _ in range(3)]
            for each in held:
                each.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert each.recv(4096).startswith(b"HTTP/1.1 200 ")
            with served.connect() as further:
                assert _all_of(further).startswith(b"HTTP/1.1 503 ")
        served.until(lambda: served.post({"prompt": [5], "max_tokens": 1})[0] == 200)
    finally:
        served.close()


def test_what_is_no_http_is_refused(served: Served) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"A" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000,
    ):
        with served.connect() as client, contextlib.suppress(ConnectionError):
            client.sendall(raw)
            client.shutdown(socket.SHUT_WR)
            first = _all_of(client)
            assert not first or first.startswith(b"HTTP/1.1 400 ") or first.startswith(b"HTTP/1.0 400 "), first
    assert 200 == served.post({"model": "policy", "prompt": [5], "max_tokens": 1})[0]


def _all_of(client: socket.socket) -> bytes:
    """What comes until the other end closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)

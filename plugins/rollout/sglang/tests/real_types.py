"""Asks SGLang's own HTTP application what this plugin asks SGLang. Runs where SGLang is, without a GPU.

Reads ``{"arguments": [...], "asked": [[path, body], ...], "vocabulary": n}`` from its input. Routes, the parsing of
bodies and of the command line, and the request types are SGLang's; behind the routes, where a scheduler would be, the
parsed requests are noted. Prints JSON: a list of ``[path, status, type of the parsed request, note]``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.abc
import importlib.machinery
import json
import sys
import types
from typing import Any, ClassVar


class AbsentMeta(type):
    """Any attribute of a class that is not there."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Absent(types.ModuleType):
    """Stands for a module that SGLang imports for images and sounds, and that is not made for this torch."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentMeta(name, (), {}) if name[0].isupper() else lambda *_, **__: lambda function: function


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them."""

    names = ("torchvision", "torchaudio", "soundfile")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Notes:
    """In the place of SGLang's tokenizer manager: notes what a route hands on."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.seen: Any = None
        self.note = ""

    async def generate_request(self, request: Any, _: Any) -> Any:
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.seen = request
        request.normalize_batch_and_arguments()
        sampling = SamplingParams(**request.sampling_params)
        sampling.normalize(types.SimpleNamespace(encode=lambda text, **_: [0] * len(text)))
        sampling.verify(self.vocabulary)
        self.note = f"{len(request.input_ids)} tokens, {sampling.max_new_tokens} more, top_k {sampling.top_k}"
        self.note += ", experts" if request.return_routed_experts else ""
        yield {"output_ids": [], "meta_info": {}}

    def create_abort_task(self, _: Any) -> None:
        return None

    def abort_request(self, rid: str, abort_all: bool) -> None:
        self.seen, self.note = None, f"abort {rid}, all: {abort_all}"

    async def flush_cache(self, timeout_s: float) -> Any:
        return types.SimpleNamespace(success=True, message="")

    def __getattr__(self, name: str) -> Any:
        async def noting(request: Any, *_: Any) -> Any:
            from sglang.srt.managers.io_struct import LoRAUpdateOutput

            self.seen = request
            if "lora" in name:
                return LoRAUpdateOutput(success=True)
            return (True, "", 0) if name == "update_weights_from_disk" else None

        return noting


async def ask(app: Any, path: str, body: Any) -> tuple[int, str]:
    """The status of an answer, and what it says if it is an error."""
    statuses: list[int] = []
    said: list[bytes] = []
    content = b"" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            said.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0], "" if statuses[0] == 200 else b"".join(said).decode()


async def main() -> None:
    wanted = json.load(sys.stdin)
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # remembered: it is not there
    sys.meta_path.insert(0, Finder())
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(wanted["arguments"]))
    found: list[Any] = [["arguments", 200, "ServerArgs", {name: parsed.get(name) for name in wanted["read"]}]]
    for path, body in wanted["asked"]:
        notes = Notes(wanted["vocabulary"])
        http_server._global_state = types.SimpleNamespace(tokenizer_manager=notes)
        status, error = await ask(http_server.app, path, body)
        found.append([path, status, type(notes.seen).__name__, error or notes.note])
    print(json.dumps(found, default=str))


asyncio.run(main())

"""Rows, a served model with scripted answers, and the commands."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from jackfield.cli import main

#: What a model answers: operators, a text, a status, or None for never.
Answer = list[Any] | str | int | None


@attrs.define(eq=False)
class Model:
    """An OpenAI-compatible server on loopback that gives scripted answers, one after the other; the last one stays."""

    script: list[Answer] = attrs.field(factory=list)
    bodies: list[dict[str, Any]] = attrs.field(factory=list)  #: of all requests
    keys: list[str | None] = attrs.field(factory=list)  #: their headers Authorization
    knows_formats: bool = True  #: whether it knows response_format
    url: str = ""
    ended: threading.Event = attrs.field(factory=threading.Event)

    def options(self) -> list[str]:
        """Return the options with which it is asked."""
        return ["--model-url", self.url, "--model", "m"]

    def asked(self) -> list[str]:
        """Return the last message of each request."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        """Return status and JSON; None: the answer never comes."""
        if not self.knows_formats and "response_format" in body:
            return 400, {"error": {"message": "response_format is not supported"}}
        self.bodies.append(body)
        self.keys.append(key)
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if said is None:
            self.ended.wait(50)
            return 503, {}
        if isinstance(said, int):
            return said, {"error": {"message": f"failed with {key}"}}
        text = said if isinstance(said, str) else json.dumps({"explanation": "as wanted", "tasks": said})
        return 200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def model() -> Iterator[Model]:
    """A server that ends with the test."""
    served = Model()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, told = served.answer(body, self.headers.get("Authorization"))
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Retry-After", "0.01")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client went at its deadline
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        served.ended.set()
        server.shutdown()
        thread.join(10)
        server.server_close()


#: Problems of 3 to 32 words; the tenth and the twentieth are the same.
RECORDS = [
    {
        "question": "Add 2 and 2." if number % 10 == 0 else f"Problem {number}: " + "add one " * (number % 15 + 1),
        "answer": "x = 1\n" * (number % 7) + str(number),
        "topic": "sums" if number % 3 else "other",
    }
    for number in range(1, 41)
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of problems in a folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "maths.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return file


def run_data(*words: object) -> Result:
    """Run `jackfield data` with words."""
    return CliRunner().invoke(main, ["data", *map(str, words)])


@pytest.fixture
def command() -> Callable[..., Result]:
    """Return what runs `jackfield data`."""
    return run_data


@pytest.fixture
def json_of() -> Callable[..., Any]:
    """Return what runs `jackfield data` with --json and returns what it printed; it has to succeed."""

    def run(*words: object) -> Any:
        found = run_data(*words, "--json")
        assert 0 == found.exit_code, found.output
        return json.loads(found.stdout)

    return run


@pytest.fixture
def error_of() -> Callable[..., dict[str, Any]]:
    """Return what runs `jackfield data` with --json and returns the error; it has to fail."""

    def run(*words: object) -> dict[str, Any]:
        found = run_data(*words, "--json")
        assert 1 == found.exit_code, found.output
        error: dict[str, Any] = json.loads(found.stdout)["error"]
        return error

    return run

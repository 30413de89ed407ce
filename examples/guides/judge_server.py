"""A judge on this machine, without a model: it counts the words of a response that the reference answer has, too.

    python examples/guides/judge_server.py [PORT]

It answers at /v1/chat/completions like a server of language models, for the reward `judge`, and at /score for the
reward `http`. The standard library is all that it needs.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def share(response: str, reference: str) -> float:
    """Return the share of the response's words that the reference has."""
    words = response.split()
    return sum(word in reference.split() for word in words) / len(words) if words else 0.0


def complete(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a chat completion: find response and reference in what is asked, and grade from 0 to 10."""
    asked = body["messages"][0]["content"]
    response = re.search(r"<response (\w+)>\n(.*?)\n</response \1>", asked, re.DOTALL)
    reference = re.search(r"Reference: (.*)", asked)
    points = round(10 * share(response[2] if response else "", reference[1] if reference else ""))
    verdict = json.dumps({"explanation": f"{points} of 10 words are known", "score": points})
    message = {"role": "assistant", "content": verdict}
    tokens = len(asked.split()) + len(verdict.split())
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": tokens}}


def score(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of the reward `http`."""
    found = share(body["answer"], body["reference"])
    return {"result": {"score": found, "parts": {"brevity": 1 / (1 + len(body["answer"].split()))}}}


class Handler(BaseHTTPRequestHandler):
    """The addresses of the server."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer that the server is up."""
        self.answer({"object": "list", "data": [{"id": "words", "object": "model"}]})

    def do_POST(self) -> None:
        """Grade a response."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(score(body) if self.path == "/score" else complete(body))

    def answer(self, value: Any) -> None:
        """Send JSON."""
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8765), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()

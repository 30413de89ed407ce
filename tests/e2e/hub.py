"""A Hugging Face Hub on loopback: model repositories in memory, read and written by huggingface_hub over HTTP."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REVISION = "1" * 40


class Hub(ThreadingHTTPServer):
    """The server. ``models`` are files by repository and name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.models: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []  #: requests
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self, body: Any, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Describe a repository, or send one of its files."""
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        described = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if described else parts[:2])
        files = self.server.models.get(name, {})
        if described and files and "tree" in parts:
            found = [{"type": "file", "path": each, "size": len(data)} for each, data in files.items()]
            self._answer([{**one, "oid": hashlib.sha1(files[one["path"]]).hexdigest()} for one in found])
        elif described and files:
            self._answer({"id": name, "sha": REVISION, "siblings": [{"rfilename": each} for each in files]})
        elif "resolve" in parts and (data := files.get(parts[-1])) is not None:
            self._answer(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=REVISION)
        else:
            self._answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        """Create a repository, or add a commit to it."""
        self.server.asked.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = "/".join(self.path.split("/")[3:5])
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.models.setdefault(name, {})
            self._answer({"url": f"{self.server.address}/{name}"})
        elif "preupload" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "commit" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.models[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{self.server.address}/{name}/commit/{REVISION}"
            self._answer({"success": True, "commitOid": REVISION, "commitUrl": address})
        else:
            self._answer({"type": "ok"})


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a Hub until the end of the block."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

"""Tests of a rollout server in another interpreter's process: handshake, calls, cancellation and deaths."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import textwrap
import venv
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import (
    BaseRolloutServer,
    GenerateRequest,
    PauseRequest,
    RolloutContext,
    SamplingParams,
    SleepRequest,
    UpdateWeightsRequest,
)
from jackfield.errors import (
    DeadlineExceeded,
    JackfieldError,
    PluginError,
    RolloutError,
    RunError,
    WeightsError,
)
from jackfield.plugins import PluginRecord, discover
from jackfield.runtime.process import ROLLOUT
from jackfield.sdk.rpc import stub
from jackfield_kept_process import RolloutProcess

SERVER = '''
import asyncio, os, subprocess, sys
import attrs
from jackfield.abc.rollout import *
from jackfield.errors import RolloutError, WeightsError

class Server(BaseRolloutServer):
    """What it does depends on the first token of a prompt."""

    async def start(self):
        print("this is the server")
        self.left = 0
        self.child = subprocess.Popen(["sleep", "600"])
        return ServerInfo(replica=self.context.replica, workers=self.config.workers)

    async def generate(self, request):
        what = request.prompt_ids[0]
        if what == 1:
            raise RolloutError("no", code="rollout.stale", where="here", expected=2, found=1, fix="go")
        if what == 2:
            raise ValueError("not ours")
        if what == 3:
            print("last words", flush=True)
            os._exit(7)
        if what == 4:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        if what == 8:
            [array] = request.multi_modal_data.values()
            about = (array.ndim, int(array.sum()), array.itemsize)
            return self.echo(attrs.evolve(request, prompt_ids=about), (0.0, 0.0, 0.0))
        return self.echo(request)

    def echo(self, request, log_probs=(float("-inf"), 0.1)):
        count = len(request.prompt_ids)
        return GenerateResult(
            request_id=request.request_id, token_ids=request.prompt_ids, log_probs=log_probs[:count],
            weight_versions=(self.left,) * count, finish_reason="length")

    async def generate_stream(self, request):
        try:
            for token in request.prompt_ids:
                yield GenerateChunk(
                    request_id=request.request_id, token_ids=(token,), log_probs=(0.5,), weight_versions=(0,))
            await asyncio.Event().wait()
        finally:
            self.left += 1

    async def abort(self, request): return AbortResult(request_ids=request.request_ids)
    async def pause(self, request): return PauseResult(running={"keep": 1, "wait": 2, "abort": 3}[request.mode])
    async def resume(self, request): return ResumeResult()
    async def sleep(self, request): return SleepResult(freed_bytes=request.level * self.context.seed)
    async def wake_up(self, request): return WakeUpResult(awake=request.tags)
    async def update_weights(self, request):
        raise WeightsError("lost", code="weights.missing", where=str(request.connect[0]["port"]))
    async def health(self):
        return HealthReport(healthy=True, running=self.left, waiting=self.child.pid)
    async def stop(self):
        self.child.kill()
        self.child.wait()
'''
CONFIG = """
import attrs

@attrs.frozen
class Config:
    workers: int = 1
"""
MANIFEST = """
name = "elsewhere"
kind = "rollout"
abi = "1.0"
object = "fake_elsewhere.server:Server"
config = "fake_elsewhere.config:Config"
"""


def install(folder: Path, version: str = "0.1.0") -> None:
    """Write the plugin's distribution into a folder."""
    package = folder / "fake_elsewhere"
    package.mkdir(parents=True)
    files = {"__init__.py": "", "server.py": SERVER, "config.py": CONFIG, "plugin.toml": MANIFEST}
    for name, content in files.items():
        (package / name).write_text(textwrap.dedent(content))
    info = folder / f"fake_elsewhere-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-elsewhere\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[jackfield.rollouts]\nelsewhere = fake_elsewhere:plugin.toml\n")


@attrs.frozen
class Elsewhere:
    """A separate environment with the plugin, and the plugin's record in this one."""

    python: str
    record: PluginRecord
    site: Path  #: its site-packages


def environment(folder: Path, *, jackfield: bool = True) -> Elsewhere:
    """Make a virtual environment with the plugin and, unless ``jackfield=False``, this one's packages."""
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    install(packages)
    if jackfield:
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (packages / "here.pth").write_text("".join(lines))
    install(folder / "here")
    record = discover([str(folder / "here")]).resolve("elsewhere", "rollout")
    return Elsewhere(str(folder / "venv" / "bin" / "python"), record, packages)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """An environment that the tests share and do not change."""
    return environment(tmp_path_factory.mktemp("elsewhere"))


def make(elsewhere: Elsewhere, *, seconds: float = 20.0, folder: Path | None = None, **settings: Any) -> RolloutProcess:
    context = RolloutContext(model=ModelSpec(path="nowhere"), replica=3, seed=11)
    options: Any = {"record": elsewhere.record, "python": elsewhere.python, "seconds": seconds, "folder": folder}
    return RolloutProcess(settings, context, **options)


def request(*prompt: int) -> GenerateRequest:
    return GenerateRequest(request_id="some", prompt_ids=prompt, sampling=SamplingParams(stop=("a",)))


def started(elsewhere: Elsewhere, use: Any, **options: Any) -> None:
    """Run ``use(server)`` on a started server, and stop it."""

    async def main() -> None:
        server = make(elsewhere, **options)
        await server.start()
        try:
            await use(server)
        finally:
            await server.stop()

    asyncio.run(main())


def refusal(awaitable: Coroutine[Any, Any, Any]) -> JackfieldError:
    with pytest.raises(JackfieldError) as caught:
        asyncio.run(awaitable)
    return caught.value


def gone(pid: int) -> bool:
    """Return whether a process ends within a few seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 20.0)[0])
    finally:
        os.close(descriptor)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_requests_and_results_come_as_they_were_sent(elsewhere: Elsewhere) -> None:
    """Settings, context and infinite log-probs arrive unchanged in the other interpreter."""

    async def use(server: RolloutProcess) -> None:
        result = await server.generate(request(5, 6))
        assert ((5, 6), (float("-inf"), 0.1)) == (result.token_ids, result.log_probs)
        assert 2 == (await server.pause(PauseRequest(mode="wait"))).running
        assert 22 == (await server.sleep(SleepRequest(level=2))).freed_bytes
        pid = server.pid
        assert elsewhere.python.encode() == Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]

    started(elsewhere, use, workers=2)


def test_arrays_of_a_request_arrive(elsewhere: Elsewhere) -> None:
    """NumPy arrays travel as bytes, and arrays of other things are refused before."""

    async def use(server: RolloutProcess) -> None:
        given = attrs.evolve(request(8), multi_modal_data={"pixel_values": np.ones((2, 3, 4), np.float32)})
        assert (3, 24, 4) == (await server.generate(given)).token_ids
        with pytest.raises(JackfieldError) as unsent:
            await server.generate(attrs.evolve(given, multi_modal_data={"pixel_values": np.array([object()])}))
        assert "agent.output" == unsent.value.code

    started(elsewhere, use)


def test_errors_keep_their_class_and_code(elsewhere: Elsewhere) -> None:
    """Jackfield's errors arrive unchanged; others become a failure of the replica that names them."""

    async def use(server: RolloutProcess) -> None:
        with pytest.raises(RolloutError) as ours:
            await server.generate(request(1))
        expected = {"code": "rollout.stale", "message": "no", "where": "here", "expected": "2", "found": "1"}
        assert expected == {name: value for name, value in ours.value.as_dict().items() if name != "fix"}
        with pytest.raises(RunError) as theirs:
            await server.generate(request(2))
        assert ("run.failed", "rollout replica 3") == (theirs.value.code, theirs.value.where)
        with pytest.raises(WeightsError) as lost:
            await server.update_weights(
                UpdateWeightsRequest(version=1, checkpoint_engine="shared", connect=({"port": 7},))
            )
        assert ("weights.missing", "7") == (lost.value.code, lost.value.where)
        with pytest.raises(RolloutError) as unsent:
            await server.generate(attrs.evolve(request(5), multi_modal_data={"image": object()}))
        assert ("rollout.request", "rollout replica 3, generate some") == (unsent.value.code, unsent.value.where)

    started(elsewhere, use)


def test_what_is_cancelled_here_ends_there(elsewhere: Elsewhere) -> None:
    """A call, a call that has not started and a closed stream have each ended when the caller continues."""

    async def use(server: RolloutProcess) -> None:
        call = asyncio.create_task(server.generate(request(4)))
        assert 0 == (await server.health()).running
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert 1 == (await server.health()).running
        early = asyncio.create_task(server.generate(request(4)))
        await asyncio.sleep(0)
        early.cancel()
        with suppress(asyncio.CancelledError):
            await early
        before = (await server.health()).running
        stream: Any = server.generate_stream(request(8, 9))
        assert [8, 9] == [(await anext(stream)).token_ids[0] for _ in range(2)]
        await stream.aclose()
        assert before + 1 == (await server.health()).running

    started(elsewhere, use)


def test_a_call_has_a_deadline_that_names_the_replica(elsewhere: Elsewhere) -> None:
    async def use(server: RolloutProcess) -> None:
        late_server = stub(server.process.connection, "worker", ROLLOUT, BaseRolloutServer, 0.05)  # type: ignore
        with pytest.raises(DeadlineExceeded) as late:
            await late_server.generate(request(4))
        assert "rollout replica 3" in late.value.message
        assert 1 == (await server.health()).running, "what nobody waits for is cancelled there"

    started(elsewhere, use)


def test_its_output_goes_to_its_log(elsewhere: Elsewhere, tmp_path: Path) -> None:
    async def use(server: RolloutProcess) -> None:
        await server.health()

    started(elsewhere, use, folder=tmp_path)
    assert "this is the server" in (tmp_path / "replica-3.log").read_text()


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_running_refuses(elsewhere: Elsewhere) -> None:
    async def main() -> None:
        server = make(elsewhere)
        await server.stop()
        with pytest.raises(RolloutError) as caught:
            await server.start()
        with pytest.raises(RolloutError) as caught:
            await server.generate(request(5))
        assert "rollout.stopped" == caught.value.code

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "found"), [((3,), "ended with exit status 7; it printed:"), ((4,), "was killed by SIGKILL")]
)
def test_a_process_that_dies_is_named(elsewhere: Elsewhere, prompt: tuple[int, ...], found: str) -> None:
    """Pending calls and streams raise how it ended and its last output, and its child processes end."""

    async def use(server: RolloutProcess) -> None:
        child = (await server.health()).waiting
        stream: Any = server.generate_stream(request(8, 9))
        assert [8, 9] == [(await anext(stream)).token_ids[0] for _ in range(2)]
        call = asyncio.create_task(server.generate(request(*prompt)))
        if prompt == (4,):
            await server.health()
            os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RolloutError) as caught:
            await call
        with pytest.raises(RolloutError) as broken:
            await anext(stream)
        for error in (caught.value, broken.value):
            assert ("rollout.stopped", "replica 3") == (error.code, error.where)
        assert str(caught.value.found).startswith(f"process {server.pid} on")
        assert found in str(caught.value.found)
        assert ("last words" in str(caught.value.found)) == (prompt == (3,))
        health = await server.health()
        assert (False, True) == (health.healthy, found in health.detail)
        assert gone(child)

    started(elsewhere, use)


def test_it_ends_with_a_parent_that_was_killed(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """After ``kill -9`` of the run, neither the process nor its child processes are left."""
    script = f"""
        import asyncio, sys
        sys.path[:0] = {sys.path!r}
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_process import Elsewhere, discover, make
        async def main():
            record = discover([{str(elsewhere.site)!r}]).resolve("elsewhere", "rollout")
            server = make(Elsewhere({elsewhere.python!r}, record, None))
            await server.start()
            print(server.pid, (await server.health()).waiting, flush=True)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert 2 == len(pids)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    assert [True, True] == [gone(pid) for pid in pids]


# -- the handshake -----------------------------------------------------------------------------------------------------


def test_another_version_of_the_plugin_is_refused(elsewhere: Elsewhere, tmp_path: Path) -> None:
    """Settings are checked by one version and used by the other, so both have to be equal."""
    install(tmp_path, "0.2.0")
    record = discover([str(tmp_path)]).resolve("elsewhere", "rollout")
    error = refusal(make(attrs.evolve(elsewhere, record=record)).start())
    assert ("plugin.handshake", record.label) == (error.code, error.where)
    assert ("0.2.0", "0.1.0") == (error.expected["plugin"]["version"], error.found["plugin"]["version"])  # type: ignore[index]
    assert "fake-elsewhere==0.2.0" in str(error.fix)


def test_an_environment_without_the_plugin_is_refused(tmp_path: Path) -> None:
    place = environment(tmp_path)
    shutil.rmtree(place.site / "fake_elsewhere-0.1.0.dist-info")
    error = refusal(make(place).start())
    assert "plugin.not-found" == error.code
    assert place.python in error.message


def test_an_environment_without_jackfield_is_refused(tmp_path: Path) -> None:
    error = refusal(make(environment(tmp_path, jackfield=False)).start())
    assert isinstance(error, PluginError)
    assert "plugin.interpreter" == error.code
    assert "No module named" in str(error.found)


def test_an_interpreter_that_says_nothing_has_a_deadline(elsewhere: Elsewhere, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    error = refusal(make(attrs.evolve(elsewhere, python=str(program)), seconds=0.3).start())
    assert isinstance(error, DeadlineExceeded)
    assert "rollout replica 3 to introduce" in error.message


def test_the_handshake_alone_takes_no_torch(elsewhere: Elsewhere) -> None:
    """An interpreter responds to `doctor` and to the start of a run without importing the plugin."""
    program = "from jackfield.plugins.interpreters import main; main('rollout', 'elsewhere')"
    command = [elsewhere.python, "-X", "importtime", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert "fake-elsewhere" == json.loads(done.stdout.splitlines()[0])["plugin"]["distribution"]
    assert not any(word in done.stderr for word in ("torch", "fake_elsewhere.server"))

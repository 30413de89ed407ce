"""Settings of the agent ``gateway``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, min_len

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_tool_calls import Format

_KINDS = ("call", "command", "external")


@attrs.frozen(kw_only=True)
class ProgramConfig:
    """What talks to the model: one of ``call``, ``command`` and ``external``."""

    call: str | None = option(
        None,
        "a Python function, folder/file.py:function or package.module:function: f(task, base_url, api_key), sync or "
        "async. It may return a reward, or an object with reward and metrics",
    )
    process: bool = option(
        True, "call it in processes of its own, which are killed at the deadline; false: in the worker, async only"
    )
    workers: int = option(
        4, "processes for call; each makes one call at a time, or many if the function is async", ge(1)
    )
    command: tuple[str, ...] | None = option(
        None,
        "a command for each rollout. It finds the address in OPENAI_BASE_URL, the key in OPENAI_API_KEY, and the task "
        "as JSON on its standard input and in the file JACKFIELD_TASK_FILE",
        min_len(1),
    )
    env: Mapping[str, str] = option(factory=dict, help="further environment variables of the command")
    reward_from: Literal["file", "last_line"] = option(
        "file",
        "where the command leaves its reward, a number or an object with reward and metrics: in the file "
        "JACKFIELD_REWARD_FILE (it need not write one), or in the last line of its output",
    )
    memory_bytes: int | None = option(4 * 2**30, "address space of each process of the program; null: unlimited", gt(0))
    external: bool = option(False, "programs that are started elsewhere, and take rollouts from the gateway")
    idle_seconds: float = option(
        60.0, "an external rollout ends that is not finished and has had no request for so long", gt(0.0)
    )
    claim_seconds: float = option(
        30.0,
        "an external program waits so long for a free rollout; then it gets 503, or 400 if its group is full",
        ge(0.0),
    )

    def __attrs_post_init__(self) -> None:
        found = [name for name in _KINDS if getattr(self, name)]
        if len(found) != 1:
            raise ConfigError(
                "the gateway has one kind of program",
                where="agent.program",
                expected="one of " + ", ".join(_KINDS),
                found=" and ".join(found) or "none",
                fix="set one of them; external: true takes programs that are started elsewhere",
            )


@attrs.frozen(kw_only=True)
class GatewayConfig:
    """An address of OpenAI's API in each agent worker, and the programs that use it."""

    program: ProgramConfig = option(help="what talks to the model")
    host: str = option("127.0.0.1", "address to listen at; one beyond loopback needs api_key_env")
    port: int = option(
        0, "port, or the first free one above it for further workers; 0: any free one", [ge(0), le(65535)]
    )
    api_key_env: str | None = option(
        None, "environment variable with the key that external programs need; null: none, on loopback only"
    )
    address_file: str | None = option(None, "file that gets the base URL, a line for each worker")
    model_name: str = option("policy", "name of the model in answers; clients may ask for any name")
    repeats: Literal["replay", "branch"] = option(
        "replay",
        "what an equal request gets: the recorded answer, or one of its own; a client's retry always gets the recorded "
        "one",
    )
    sampling: Literal["run", "client"] = option(
        "run", "whose temperature, top_p, top_k and min_p count: the run's, or those of requests that have them"
    )
    format: Format | Literal["auto", "none"] = option(
        "auto", "how the model writes tool calls; auto: as its chat template does; none: they are text"
    )
    on_template_change: Literal["refuse", "fork", "keep"] = option(
        "fork",
        "if the chat template would render earlier turns otherwise than the model saw them: refuse the request, begin "
        "another sequence, or go on with what the model saw",
    )
    on_overflow: Literal["truncate", "end"] = option(
        "end", "if the context has no room for new messages: cut the longest of them, or refuse the request"
    )
    seconds: float | None = option(None, "deadline of the program; null: that of the rollout", gt(0.0))
    on_failure: Literal["fail", "keep"] = option(
        "fail", "if the program fails or is late: the rollout fails, or what was recorded is kept"
    )
    reward_seconds: float = option(
        0.0, "how long a rollout that has ended waits for a reward; without one, the run's reward agent scores", ge(0.0)
    )
    request_seconds: float = option(600.0, "the longest that one request may take", gt(0.0))
    body_seconds: float = option(30.0, "the longest that a request's body may take to come", gt(0.0))
    idle_seconds: float = option(30.0, "a connection is closed that has sent no whole header for so long", gt(0.0))
    max_body_bytes: int = option(16 * 2**20, "a longer request is refused", gt(0))
    max_connections: int = option(4096, "at a time; further ones are answered with 503", ge(1))

    @property
    def external(self) -> bool:
        """Return whether programs take rollouts from the gateway."""
        return self.program.external

    def overrides(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of a request that count."""
        return {} if self.sampling == "run" else {name: value for name, value in given.items() if value is not None}

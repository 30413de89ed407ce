"""The structure checks refuse each violation of a contract by a class, and nothing else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable
from typing import Any

import pytest

from jackfield.abc import CONTRACTS, KINDS
from jackfield.abc.agent import AgentLoopBase
from jackfield.abc.checkpoint_engine import CheckpointEngine
from jackfield.abc.engine import BaseEngine
from jackfield.abc.reward import RewardAgent
from jackfield.abc.rollout import BaseRolloutServer
from jackfield.errors import PluginError
from jackfield.plugins.manifest import flavour, signature_of, structure_problems


def fitting(kind: str, **members: Any) -> type:
    """Return a concrete subclass with all members of its contract; ``members`` replace some."""
    contract = CONTRACTS[kind]

    def concrete(name: str) -> Any:
        wanted = flavour(contract, name)
        if wanted == "property":
            return property(lambda self: None)
        namespace: dict[str, Any] = {}
        body = "yield" if wanted in ("async generator", "generator") else "return"
        async_ = "async " if wanted in ("async", "async generator") else ""
        plain = (each.replace(annotation=each.empty) for each in signature_of(contract, name).parameters.values())
        parameters = ", ".join(["self", *map(str, plain)])
        exec(f"{async_}def {name}({parameters}):\n    {body}", namespace)  # a real function of its own
        return classmethod(namespace[name]) if isinstance(contract.__dict__[name], classmethod) else namespace[name]

    abstract: frozenset[str] = contract.__abstractmethods__  # type: ignore[attr-defined]
    return type("Fake", (contract,), {**{name: concrete(name) for name in abstract}, **members})


def problems(kind: str, cls: object) -> list[PluginError]:
    return list(structure_problems(kind, cls, "the plugin"))


def codes(kind: str, **members: Any) -> list[str]:
    return [problem.code for problem in problems(kind, fitting(kind, **members))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_follows_its_contract_fits(kind: str):
    assert [] == problems(kind, fitting(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_itself_lacks_every_abstract_method(kind: str):
    found = problems(kind, CONTRACTS[kind])
    assert ["plugin.abstract-method"] == [problem.code for problem in found]
    for name in CONTRACTS[kind].__abstractmethods__:  # type: ignore[attr-defined]
        assert name in found[0].message


@pytest.mark.parametrize("thing", [object, BaseEngine, lambda: None, None])
def test_what_is_not_a_subclass_is_refused(thing: object):
    assert ["plugin.not-a-subclass"] == [problem.code for problem in problems("reward", thing)]


def test_what_is_missing_is_named():
    (found,) = problems("reward", type("Fake", (RewardAgent,), {}))
    assert ("plugin.abstract-method", "abstract: compute_score") == (found.code, found.found)


async def _coroutine(self: Any, request: Any) -> None: ...


async def _async_generator(self: Any) -> Any:
    yield


def _plain(self: Any) -> None: ...


def _generator(self: Any) -> Any:
    yield


def _returns_awaitable(self: Any, request: Any) -> Awaitable[None]:
    return _coroutine(self, request)


@functools.wraps(_coroutine)
def _wrapped_coroutine(*args: Any) -> Any:
    return _coroutine(*args)


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("reward", {"compute_score": _returns_awaitable}),
        ("reward", {"compute_score": _wrapped_coroutine}),
        ("checkpoint_engine", {"receive_weights": _async_generator}),
        ("checkpoint_engine", {"receive_weights": _plain}),
        ("checkpoint_engine", {"build_topology": staticmethod(lambda request: None)}),
        ("engine", {"get_per_tensor_grad": _generator}),
        ("engine", {"get_per_tensor_grad": _plain}),
        ("engine", {"train_mode": contextlib.contextmanager(_generator)}),
        ("engine", {"train_mode": _plain}),
        ("engine", {"layout": functools.cached_property(_plain)}),
        ("engine", {"layout": None}),
        ("engine", {"optimizer_step": lambda self, closure=None, **more: None}),
        ("engine", {"to": lambda self, *args, **kwargs: None}),
        ("reward", {"__init__": lambda self, settings, environment: None}),
    ],
)
def test_other_ways_to_write_the_same_are_accepted(kind: str, members: dict[str, Any]):
    assert [] == codes(kind, **members)


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("reward", {"compute_score": lambda self, request: None}),
        ("rollout", {"generate": lambda self, request: None}),
        ("engine", {"optimizer_step": _coroutine}),
        ("engine", {"optimizer_step": _generator}),
        ("reward", {"compute_score": _async_generator}),
        ("checkpoint_engine", {"receive_weights": _coroutine}),
        ("checkpoint_engine", {"receive_weights": _generator}),
        ("engine", {"train_mode": _generator}),
        ("engine", {"train_mode": contextlib.asynccontextmanager(_async_generator)}),
        ("engine", {"disable_adapter": _coroutine}),
        ("engine", {"get_per_tensor_grad": _async_generator}),
    ],
)
def test_another_flavour_is_refused(kind: str, members: dict[str, Any]):
    assert ["plugin.sync-async"] == codes(kind, **members)


async def _no_request(self: Any) -> None: ...
async def _other_name(self: Any, req: Any) -> None: ...
async def _extra(self: Any, request: Any, retries: Any) -> None: ...
async def _extra_by_name(self: Any, request: Any, *, retries: Any) -> None: ...
async def _only_by_position(self: Any, request: Any, /) -> None: ...
async def _only_by_name(self: Any, *, request: Any) -> None: ...
async def _no_keywords(self: Any, sampling_params: Any) -> None: ...
async def _needs_messages(self: Any, sampling_params: Any, messages: Any, **fields: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "members", "found"),
    [
        ("reward", {"compute_score": _no_request}, "too many positional arguments"),
        ("reward", {"compute_score": _other_name}, "'req' is in the place of 'request'"),
        ("reward", {"compute_score": _extra}, "missing a required argument: 'retries'"),
        ("reward", {"compute_score": _extra_by_name}, "missing a required argument: 'retries'"),
        ("reward", {"compute_score": _only_by_position}, "request"),
        ("reward", {"compute_score": _only_by_name}, "too many positional arguments"),
        ("agent", {"run": _no_keywords}, "unexpected keyword argument 'another'"),
        ("agent", {"run": _needs_messages}, "missing a required argument: 'messages'"),
        (
            "engine",
            {"to": lambda self, device, model, optimizer=True, grad=True: None},
            "required argument: 'model'",
        ),
        (
            "engine",
            {"to": lambda self, device, optimizer=True, model=True, grad=True: None},
            "is in the place of 'model'",
        ),
        ("engine", {"layout": lambda self: None}, "sync"),
        ("engine", {"optimizer_step": property(_plain)}, "property"),
        ("engine", {"optimizer_step": None}, "property"),
        ("checkpoint_engine", {"build_topology": lambda self, request: None}, "needs an instance"),
        ("reward", {"__init__": lambda self, config: None}, "__init__(config"),
        ("reward", {"__init__": lambda self, config, context, more: None}, "__init__(config"),
        # methods with a default body are held to the contract as well
        ("reward", {"post_process_scores": lambda self: None}, "too many positional arguments"),
    ],
)
def test_other_parameters_are_refused_and_named(kind: str, members: dict[str, Any], found: str):
    (problem,) = problems(kind, fitting(kind, **members))
    (name,) = members
    assert "plugin.signature" == problem.code
    assert str(problem.where).endswith(f".{name}")
    assert found in str(problem.found)


def test_every_problem_of_a_class_is_told():
    members = {"generate": lambda self, request: None, "abort": _other_name}
    assert {"plugin.sync-async", "plugin.signature"} == set(codes("rollout", **members))


def test_the_gate_runs_nothing_of_the_class():
    """Looking at a property must not evaluate it."""

    def fail(self: Any) -> None:
        raise AssertionError("evaluated")

    assert [] == codes("engine", layout=property(fail))


def test_flavours_of_the_contracts():
    """Contracts are read by their return annotations where the code does not tell."""
    expected = {
        (BaseEngine, "train_mode"): "context manager",
        (BaseEngine, "layout"): "property",
        (BaseEngine, "get_per_tensor_grad"): "generator",
        (BaseEngine, "get_per_tensor_param"): "sync",
        (BaseRolloutServer, "generate_stream"): "async generator",
        (CheckpointEngine, "receive_weights"): "async generator",
        (AgentLoopBase, "run"): "async",
    }
    assert expected == {(cls, name): flavour(cls, name) for cls, name in expected}

"""Small parts by kind and name, and how they are called.

A part is a plain function. Its *inputs* are tensors and counts: parameters that it takes by position, parameters
without a default, and those of a name in :data:`INPUTS`; they are optional where they default to None. Its other
keyword-only parameters are its *options*: what a configuration sets. So the signature says what a part needs, and its
docstring what it is: the equation with its paper, ``-A log pi. [Williams, 1992]``, and a paragraph that begins with
``Differs:``. Nothing has to be declared twice. Everything is passed by name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import attrs

from jackfield.errors import ConfigError

#: How much of a batch a part has to see at once.
Scope = Literal["token", "sequence", "group", "batch"]

_PER_TOKEN = (
    "advantages log_probs old_log_probs ref_log_probs response_mask rollout_log_probs rollout_weights sum_pi_squared "
    "token_rewards values"
)
_PER_ROW = "anchor_ids baseline_rewards expert_mask group_ids pair_ids reward_dimensions rewards rollout_ids step_ids"

#: Inputs per token, ``[B, T]`` …
TOKEN_INPUTS = frozenset(_PER_TOKEN.split())
#: … counts over the whole batch …
COUNTS = frozenset(f"global_{rows}{what}" for rows in ("", "usual_", "expert_") for what in ("tokens", "sequences"))
#: … and all names, with those per row, that are inputs wherever they stand in a signature.
INPUTS = TOKEN_INPUTS.union(COUNTS, _PER_ROW.split())

F = TypeVar("F", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class Signature:
    """What a part's function takes."""

    inputs: Mapping[str, bool]  #: name to whether it is required
    options: Mapping[str, Any]  #: name to default
    open: bool  #: it has ``**kwargs`` and takes whatever it is given

    def takes(self, name: str) -> bool:
        """Return whether the function takes an input of this name."""
        return self.open or name in self.inputs


@attrs.frozen(kw_only=True)
class Part:
    """A registered function.

    Parts of scope ``batch`` refuse a schedule that streams mini-batches.
    """

    kind: str  #: ``advantages``, ``loss``, ``kl``, ``aggregation``, ``distillation``, ``shaping``, ``correction`` …
    name: str  #: unique in its kind
    function: Callable[..., Any]
    scope: Scope
    whole_batch: tuple[str, ...] = ()  #: inputs that have to be precomputed when the batch is split
    per_sequence: bool = False  #: a loss with one value per row, so that nothing per token can weigh it
    #: Makes the columns of ``whole_batch`` by name. It takes inputs and options of the loss, the latter without
    #: defaults.
    prepare: Callable[..., Mapping[str, Any]] | None = None
    batch_options: Mapping[str, Any] = attrs.field(factory=dict)  #: option values that make its scope ``batch``

    def scope_with(self, options: Mapping[str, Any]) -> Scope:
        """Return its scope under these options."""
        raised = any(options.get(name) == value for name, value in self.batch_options.items())
        return "batch" if raised else self.scope

    @property
    def equation(self) -> str:
        """The first paragraph of the function's docstring, without the citation."""
        return self._cited[0]

    @property
    def paper(self) -> str:
        """Where the equation is from."""
        return self._cited[2] or ""

    @property
    def _cited(self) -> tuple[str, ...]:
        first = " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())
        found = re.fullmatch(r"(.*?)((?<=\.) \[(.*)\])?", first)
        return found.groups() if found else (first, "", "")

    @property
    def differs(self) -> str:
        """Where this differs from well-known implementations, and why."""
        paragraphs = (inspect.getdoc(self.function) or "").split("\n\n")
        return next((" ".join(one.split()[1:]) for one in paragraphs if one.startswith("Differs: ")), "")

    @property
    def signature(self) -> Signature:
        """The inputs and options of the function."""
        return signature(self.function)

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that it cannot do without, beside those of :attr:`whole_batch`."""
        inputs = self.signature.inputs
        return tuple(name for name, required in inputs.items() if required and name not in self.whole_batch)

    @property
    def accepts(self) -> tuple[str, ...]:
        """The inputs that it uses where they are given."""
        return tuple(name for name in self.signature.inputs if name not in self.needs)

    @property
    def prepare_inputs(self) -> Mapping[str, bool]:
        """The inputs of :attr:`prepare` beside options of the loss; whether each is required."""
        known = {} if self.prepare is None else signature(self.prepare).inputs
        return {name: required for name, required in known.items() if name not in self.options}

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options and their defaults."""
        return self.signature.options


_PARTS: dict[tuple[str, str], Part] = {}


def register(kind: str, name: str, scope: Scope, **fields: Any) -> Callable[[F], F]:
    """Register the decorated function as a part; ``fields`` are further ones of :class:`Part`."""

    def decorator(function: F) -> F:
        _add(Part(kind=kind, name=name, function=function, scope=scope, **fields))
        return function

    return decorator


def register_part(kind: str, name: str, candidate: Part | Callable[..., Any]) -> None:
    """Register what a plugin's hook ``register_parts`` offers.

    A bare function counts as scope ``batch``, which every schedule that hands out whole batches supports.

    Raises:
        ConfigError: another part of this kind has this name, or a Part is offered under another one.
    """
    if not isinstance(candidate, Part):
        candidate = Part(kind=kind, name=name, function=candidate, scope="batch")
    if (candidate.kind, candidate.name) != (kind, name):
        raise ConfigError(
            "a part is offered under another kind or name than its own",
            where=f"{kind}:{name}",
            found=f"{candidate.kind}:{candidate.name}",
        )
    _add(candidate)


def _add(new: Part) -> None:
    known = _PARTS.setdefault((new.kind, new.name), new)
    if known.function is not new.function:
        raise ConfigError(f"two parts of kind {new.kind} are named {new.name!r}", where=f"{new.kind}:{new.name}")


def part(kind: str, name: str) -> Part:
    """Return the part of this kind and name.

    Raises:
        ConfigError: ``algorithm.unknown``, with what there is.
    """
    if (kind, name) in _PARTS:
        return _PARTS[kind, name]
    close = difflib.get_close_matches(name, names(kind), n=1)
    raise ConfigError(
        f"no part of kind {kind} is named {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""),
        code="algorithm.unknown",
        where=f"algorithm: {kind}",
        expected="one of " + ", ".join(names(kind)),
        found=name,
    )


def names(kind: str) -> tuple[str, ...]:
    """Return the sorted names of one kind."""
    return tuple(sorted(name for known, name in _PARTS if known == kind))


@functools.cache
def signature(function: Callable[..., Any]) -> Signature:
    """Read inputs and options of a part's function."""
    inputs: dict[str, bool] = {}
    options: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters.values()
    for one in parameters:
        required = one.default is one.empty
        if one.kind is one.KEYWORD_ONLY and not required and one.name not in INPUTS:
            options[one.name] = one.default
        elif one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            inputs[one.name] = required
    return Signature(inputs=inputs, options=options, open=any(one.kind is one.VAR_KEYWORD for one in parameters))


def call(chosen: Part, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a part with those of the offered inputs that it takes, and with its options.

    An input that is None counts as not offered.

    Raises:
        ConfigError: ``algorithm.input``: a required input is missing.
    """
    known = chosen.signature
    given = {name: value for name, value in offered.items() if value is not None and known.takes(name)}
    missing = [name for name, required in known.inputs.items() if required and name not in given]
    if missing and not known.open:
        hint = f"or {', '.join(chosen.prepare_inputs)}, of which prepare makes it" if chosen.prepare else None
        raise ConfigError(
            f"{chosen.kind} {chosen.name} needs {' and '.join(missing)}",
            code="algorithm.input",
            where=f"algorithm: {chosen.kind} {chosen.name}",
            expected=hint or ", ".join(chosen.needs),
            found=", ".join(sorted(given)),
        )
    return chosen.function(**given, **options)

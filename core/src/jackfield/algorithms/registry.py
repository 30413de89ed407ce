"""Small parts by kind and name, and how they are called.

A part is a plain function. Its *inputs* are tensors and counts: parameters that it takes by position, parameters
without a default, and those of a name in :data:`INPUTS`; they are optional where they default to None. Its other
keyword-only parameters are its *options*: what a configuration sets. So the signature says what a part needs, and
nothing has to be declared twice. Everything is passed by name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import attrs

from jackfield.errors import ConfigError

__all__ = ["Part", "Scope", "call", "names", "part", "register", "register_part"]

#: How much of a batch a part has to see at once.
Scope = Literal["token", "sequence", "group", "batch"]

#: Names that are inputs wherever they stand in a signature.
INPUTS = frozenset(
    {
        "advantages",
        "anchor_ids",
        "baseline_rewards",
        "expert_mask",
        "global_sequences",
        "global_tokens",
        "group_ids",
        "log_probs",
        "old_log_probs",
        "pair_ids",
        "ref_log_probs",
        "response_mask",
        "reward_dimensions",
        "rewards",
        "rollout_log_probs",
        "rollout_ids",
        "step_ids",
        "token_rewards",
        "values",
    }
)

F = TypeVar("F", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class Signature:
    """What a part's function takes."""

    inputs: Mapping[str, bool]  #: name to whether it is required
    options: Mapping[str, Any]  #: name to default
    open: bool  #: it has ``**kwargs`` and takes whatever it is given


@attrs.frozen(kw_only=True)
class Part:
    """A registered function. Parts of scope ``batch`` refuse a schedule that streams mini-batches."""

    kind: str
    name: str
    function: Callable[..., Any]
    scope: Scope
    paper: str = ""
    differs: str = ""  #: where this differs from well-known implementations, and why
    whole_batch: tuple[str, ...] = ()  #: inputs that have to be precomputed when the batch is split
    per_sequence: bool = False  #: a loss with one value per row, so that nothing per token can weigh it
    prepare: Callable[..., Mapping[str, Any]] | None = None  #: makes the columns of ``whole_batch``
    batch_options: Mapping[str, Any] = attrs.field(factory=dict)  #: option values that make its scope ``batch``

    def scope_with(self, options: Mapping[str, Any]) -> Scope:
        """Its scope under these options."""
        raised = any(options.get(name) == value for name, value in self.batch_options.items())
        return "batch" if raised else self.scope

    @property
    def equation(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs that it cannot do without."""
        return tuple(name for name, required in signature(self.function).inputs.items() if required)

    @property
    def accepts(self) -> tuple[str, ...]:
        """The inputs that it uses where they are given."""
        return tuple(name for name, required in signature(self.function).inputs.items() if not required)

    @property
    def prepare_inputs(self) -> Mapping[str, bool]:
        """The inputs of :attr:`prepare`, and whether each is required; it takes options of the loss, too."""
        known = {} if self.prepare is None else signature(self.prepare).inputs
        return {name: required for name, required in known.items() if name not in self.options}

    @property
    def options(self) -> Mapping[str, Any]:
        """Its options and their defaults."""
        return signature(self.function).options


_PARTS: dict[tuple[str, str], Part] = {}


def register(
    kind: str,
    name: str,
    scope: Scope,
    paper: str = "",
    *,
    differs: str = "",
    whole_batch: tuple[str, ...] = (),
    per_sequence: bool = False,
    prepare: Callable[..., Mapping[str, Any]] | None = None,
    batch_options: Mapping[str, Any] | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as a part.

    Args:
        kind: ``advantages``, ``loss``, ``kl``, ``aggregation``, ``distillation``, ``shaping``,
            ``correction`` or ``algorithm``.
        name: unique in its kind.
        scope: how much of a batch it has to see at once.
        paper: where its equation is from.
        differs: where it differs from well-known implementations, and why.
        whole_batch: inputs that have to be precomputed over the whole batch when the batch is split.
        per_sequence: whether a loss has one value per row in the place of one per token.
        prepare: a function of the whole batch that makes the columns of ``whole_batch`` by name. It takes inputs and
            options of the loss, the latter without defaults.
        batch_options: option values that make the scope ``batch``.
    """

    def decorator(function: F) -> F:
        _add(
            Part(
                kind=kind,
                name=name,
                function=function,
                scope=scope,
                paper=paper,
                differs=differs,
                whole_batch=whole_batch,
                per_sequence=per_sequence,
                prepare=prepare,
                batch_options=dict(batch_options or {}),
            )
        )
        return function

    return decorator


def register_part(kind: str, name: str, candidate: Part | Callable[..., Any]) -> None:
    """What a run hands to the plugins' hook ``register_parts``.

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
    known = _PARTS.get((new.kind, new.name))
    if known is not None and known.function is not new.function:
        raise ConfigError(f"two parts of kind {new.kind} are named {new.name!r}", where=f"{new.kind}:{new.name}")
    _PARTS[new.kind, new.name] = new


def part(kind: str, name: str) -> Part:
    """The part of this kind and name.

    Raises:
        ConfigError: ``algorithm.unknown``, with what there is.
    """
    try:
        return _PARTS[kind, name]
    except KeyError:
        raise ConfigError(
            f"no part of kind {kind} is named {name!r}" + _suggestion(name, names(kind)),
            code="algorithm.unknown",
            where=f"algorithm: {kind}",
            expected="one of " + ", ".join(names(kind)),
            found=name,
        ) from None


def names(kind: str) -> tuple[str, ...]:
    """The sorted names of one kind."""
    return tuple(sorted(name for known, name in _PARTS if known == kind))


@functools.cache
def signature(function: Callable[..., Any]) -> Signature:
    """Inputs and options of a part's function."""
    inputs: dict[str, bool] = {}
    options: dict[str, Any] = {}
    is_open = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.default is not parameter.empty
            and parameter.name not in INPUTS
        ):
            options[parameter.name] = parameter.default
        else:
            inputs[parameter.name] = parameter.default is parameter.empty
    return Signature(inputs=inputs, options=options, open=is_open)


def check_options(chosen: Part, options: Mapping[str, Any], extras: tuple[str, ...] = ()) -> None:
    """Refuse options that the part does not have, beside inputs of its own and ``extras`` that anyone may offer.

    Raises:
        ConfigError: ``algorithm.input``.
    """
    known = signature(chosen.function)
    if known.open:
        return
    for name in options:
        if name not in known.options and name not in known.inputs and name not in extras:
            raise ConfigError(
                f"{chosen.kind} {chosen.name} has no option {name!r}" + _suggestion(name, known.options),
                code="algorithm.input",
                where=f"algorithm: {chosen.kind} {chosen.name}",
                expected="one of " + ", ".join(known.options) if known.options else "no options",
                found=name,
            )


def call(chosen: Part, offered: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a part with those of the offered inputs that it takes, and with options.

    Options may hold inputs, too; an input that is None counts as not offered.

    Raises:
        ConfigError: ``algorithm.input``: a required input is missing, or it has no such option.
    """
    known = signature(chosen.function)
    given = {name: value for name, value in {**offered, **options}.items() if value is not None}
    if known.open:
        return chosen.function(**given)
    inputs = {name: given[name] for name in known.inputs if name in given}
    missing = [name for name, required in known.inputs.items() if required and name not in inputs]
    if missing:
        raise ConfigError(
            f"{chosen.kind} {chosen.name} needs {' and '.join(missing)}",
            code="algorithm.input",
            where=f"algorithm: {chosen.kind} {chosen.name}",
            expected=", ".join(chosen.needs),
            found=", ".join(sorted(given)),
        )
    chosen_options = {name: value for name, value in options.items() if name in known.options}
    result: Any = chosen.function(**inputs, **chosen_options)
    return result


def _suggestion(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""

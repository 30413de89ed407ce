"""The registry of small parts by kind and name.

A part is a plain function. Its *inputs* are tensors and counts, each of which is given by name or in one object,
:class:`Inputs`, whose attributes the registration lists. By name, inputs are positional parameters, parameters without
a default, and those in :data:`INPUTS`; an input with the default None is optional. Other keyword-only parameters are
*options*, which a configuration sets in the range of the annotation. The docstring has the equation with its paper,
``-A log pi. [Williams, 1992]``, and a paragraph that begins with ``Differs:``.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.algorithms.tensors import Groups, row_sums
from jackfield.errors import ConfigError, did_you_mean
from jackfield.settings import range_of, structure

if TYPE_CHECKING:
    from torch import Tensor

#: The kinds of parts, beside samplers.
KINDS: tuple[str, ...] = ("algorithm", "advantages", "loss", "preparation", "kl", "correction", "aggregation")
KINDS += ("distillation", "shaping", "tracker")

#: The part of a batch that a part needs at once.
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
#: … and all names, including inputs per row, that are inputs at any position of a signature.
INPUTS = TOKEN_INPUTS.union(COUNTS, _PER_ROW.split())

#: Ranges of options, as annotations: ``beta: Positive = 0.1``. A plugin may also use its own validators.
Positive: TypeAlias = Annotated[float, gt(0.0)]
NotNegative: TypeAlias = Annotated[float, ge(0.0)]
Share: TypeAlias = Annotated[float, ge(0.0), le(1.0)]
Epsilon: TypeAlias = Annotated[float, gt(0.0), le(1.0)]
ClipDual: TypeAlias = Annotated[float, gt(1.0)]

F = TypeVar("F", bound=Callable[..., Any])
_parameters = functools.cache(lambda function: inspect.signature(function).parameters)
#: Inputs of every part of a kind that takes an :class:`Inputs`.
_COMMON = {"loss": "log_probs response_mask", "advantages": "token_rewards response_mask"}
_COMMON["preparation"] = _COMMON["loss"]


def above(lower: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return a validator for values above another option of the same part or field of the same class."""

    def check(made: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not value > getattr(made, lower):
            raise ValueError(f"'{attribute.name}' must be more than {lower}, {getattr(made, lower)!r}: {value!r}")

    return check


def ascending(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check that a lower bound is below the upper bound."""
    if not value[0] < value[1]:
        raise ValueError(f"'{attribute.name}' must be a lower and a higher number: {value!r}")


class Inputs(types.SimpleNamespace):
    """The inputs of one call as attributes, of the shapes that the caller documents; an absent optional one is None.

    Callers are :func:`jackfield.algorithms.policy_loss` and :func:`jackfield.algorithms.advantages`. Losses get
    tensors with 0 where ``response_mask`` is 0. Preparations also get options of the loss.
    """

    @functools.cached_property
    def groups(self) -> Groups:
        """The rows by ``group_ids``."""
        return Groups(self.group_ids)

    @functools.cached_property
    def scores(self) -> Tensor:
        """The total reward of each row, float64 ``[B]``."""
        return row_sums(self.token_rewards)


def _is_option(one: inspect.Parameter) -> bool:
    return one.kind is one.KEYWORD_ONLY and one.default is not one.empty and one.name not in INPUTS


@attrs.frozen(kw_only=True)
class Part:
    """A registered function. A part of scope ``batch`` refuses a schedule that streams mini-batches."""

    kind: str  #: ``advantages``, ``loss``, ``preparation`` (of a loss), ``kl``, ``aggregation``, ``shaping`` …
    name: str  #: unique in its kind
    function: Callable[..., Any]
    scope: Scope
    #: attributes that it reads from an :class:`Inputs`, with ``?`` after optional ones, besides those of
    #: :attr:`whole_batch`; None: parameters name the inputs
    listed: str | None = None
    whole_batch: tuple[str, ...] = ()  #: inputs that must be precomputed when the batch is split
    per_sequence: bool = False  #: a loss with one value per row, to which token weights cannot apply
    batch_options: Mapping[str, Any] = attrs.field(factory=dict)  #: option values that make its scope ``batch``
    origin: str = ""  #: the distribution with its version, if a package of hooks registered it

    def scope_with(self, options: Mapping[str, Any]) -> Scope:
        """Return the scope with these options."""
        raised = any(options.get(name) == value for name, value in self.batch_options.items())
        return "batch" if raised else self.scope

    @property
    def text(self) -> tuple[str, str, str]:
        """The equation, its paper (in brackets) and the differences, from the function's docstring."""
        first, *others = (inspect.getdoc(self.function) or "").split("\n\n")
        equation, paper = re.fullmatch(r"(.*?)(?:(?<=\.) \[(.*)\])?", " ".join(first.split())).groups()  # type: ignore[union-attr]
        differs = next((" ".join(one.split()[1:]) for one in others if one.startswith("Differs: ")), "")
        return equation, paper or "", differs

    @property
    def options(self) -> Mapping[str, Any]:
        """The options and their defaults."""
        return {name: one.default for name, one in _parameters(self.function).items() if _is_option(one)}

    @property
    def inputs(self) -> Mapping[str, bool]:
        """The inputs, and whether each is required."""
        if self.listed is not None:
            listed = f"{_COMMON.get(self.kind, '')} {self.listed}".split()
            taken = {name.rstrip("?"): name[-1] != "?" for name in listed}
            return {**dict.fromkeys(self.whole_batch, True), **taken}
        known = (one for one in _parameters(self.function).values() if not _is_option(one))
        return {one.name: one.default is one.empty for one in known if "VAR_" not in one.kind.name}

    @property
    def open(self) -> bool:
        """True if the function has ``**kwargs`` and accepts any option."""
        return any(one.kind is one.VAR_KEYWORD for one in _parameters(self.function).values())

    @property
    def needs(self) -> tuple[str, ...]:
        """The required inputs, except those of :attr:`whole_batch`."""
        return tuple(name for name, required in self.inputs.items() if required and name not in self.whole_batch)

    @property
    def preparation(self) -> Part | None:
        """The part that computes the columns of :attr:`whole_batch`, from inputs and options of this loss."""
        return _PARTS.get(("preparation", self.name)) if self.kind == "loss" else None

    def missing(self, offered: Mapping[str, Any]) -> list[str]:
        """Return the required inputs that are not offered, or are None."""
        return [name for name, required in self.inputs.items() if required and offered.get(name) is None]

    @property
    def ranges(self) -> Mapping[str, str]:
        """The ranges of options as text."""
        fields = attrs.fields_dict(_settings(self.kind, self.function))
        return {name: text for name in self.options if (text := range_of(fields[name].validator))}

    def checked(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Check and convert options of a configuration. An error names the option's path."""
        if self.open or not given:
            return dict(given)
        made = attrs.asdict(structure(_settings(self.kind, self.function), given, where), recurse=False)
        return {name: made[name] for name in given}

    def split(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Separate a caller's inputs and options, and check the options (``algorithm.input``).

        Callers may offer every known input to every part.
        """
        taken = INPUTS.union(self.inputs)
        options = {name: value for name, value in given.items() if name not in taken}
        try:
            checked = self.checked(options, f"{self.kind} {self.name}")
        except ConfigError as error:
            error.code, error.fix = "algorithm.input", None
            raise
        return {name: value for name, value in given.items() if name in taken}, checked

    def __call__(self, offered: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Any:
        """Call the function with its options and with the offered inputs that it takes and that are not None.

        Raises ``algorithm.input`` if a required input is missing.
        """
        known, takes_all = self.inputs, self.open
        given = {key: value for key, value in offered.items() if value is not None and (takes_all or key in known)}
        if missing := self.missing(given):
            message, where = f"needs {' and '.join(missing)}", f"{self.kind} {self.name}"
            made = f"; {', '.join(self.whole_batch)} from prepare, of the whole batch" if self.preparation else ""
            details = {"expected": ", ".join(self.needs) + made, "found": ", ".join(sorted(given))}
            raise ConfigError(f"{where} {message}", code="algorithm.input", where=f"algorithm: {where}", **details)
        if self.listed is not None:
            return self.function(Inputs(**{**dict.fromkeys(known), **given}), **(options or {}))
        return self.function(**given, **(options or {}))


_PARTS: dict[tuple[str, str], Part] = {}


def register(
    kind: str, name: str, scope: Scope = "batch", listed: str | None = None, **fields: Any
) -> Callable[[F], F]:
    """Register the decorated function as a part; ``listed`` and ``fields`` are other fields of :class:`Part`.

    Every schedule with whole batches supports the scope ``batch``. Two functions of one kind and name are refused.
    """

    def decorator(function: F) -> F:
        made = Part(kind=kind, name=name, function=function, scope=scope, listed=listed, **fields)
        if _PARTS.setdefault((kind, name), made).function is not function:
            raise ConfigError(f"two parts of kind {kind} are named {name!r}", where=f"{kind}:{name}")
        return function

    return decorator


def part(kind: str, name: str) -> Part:
    """Return the part with this kind and name, or raise ``algorithm.unknown`` with the known names."""
    if (kind, name) in _PARTS:
        return _PARTS[kind, name]
    raise unknown_part(f"part of kind {kind}", name, names(kind), f"algorithm: {kind}")


def unknown_part(noun: str, name: str, known: Sequence[str], where: str = "algorithm") -> ConfigError:
    """Return the error for a name that no part has."""
    message, expected = f"no {noun} is named {name!r}{did_you_mean(name, known)}", "one of " + ", ".join(known)
    return ConfigError(message, code="algorithm.unknown", where=where, expected=expected, found=name)


def names(kind: str) -> tuple[str, ...]:
    """Return the sorted names of one kind."""
    return tuple(sorted(name for known, name in _PARTS if known == kind))


@functools.cache
def _settings(kind: str, function: Callable[..., Any]) -> type:
    """Return a part's options as a settings class; attrs validators in ``Annotated`` are their ranges.

    Every loss has a ``length_norm`` for its aggregation.
    """
    if isinstance(function, type):
        return function
    fields: dict[str, Any] = {}
    known = getattr(inspect.unwrap(function), "__globals__", {})
    for name, one in _parameters(function).items():
        if _is_option(one):
            given = {} if one.annotation is one.empty else {name: one.annotation}
            annotated = types.SimpleNamespace(__annotations__=given)
            try:
                declared, type_ = (get_type_hints(annotated, known, None, extras)[name] for extras in (True, False))
            except Exception:  # no annotation, or imported only for type checkers: the default has the type
                declared = type_ = type(one.default) if isinstance(one.default, bool | int | float | str) else Any
            members = (declared, *get_args(declared))
            checks = [check for member in members for check in getattr(member, "__metadata__", ())]
            validator = optional(and_(*checks)) if checks else None
            fields[name] = attrs.field(default=one.default, type=type_, validator=validator)
    if kind == "loss":
        number: Any = float | None
        fields["length_norm"] = attrs.field(default=None, type=number, validator=optional(gt(0.0)))
    return attrs.make_class(function.__name__, fields, frozen=True, kw_only=True)

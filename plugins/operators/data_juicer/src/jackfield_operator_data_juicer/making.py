"""Makes operators of Data-Juicer, without network, models, programs and installations, and reads their code."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from data_juicer.ops import OPERATORS
from data_juicer.ops.base_op import NON_STATS_FILTERS, OP, Filter
from data_juicer.utils.lazy_loader import LazyLoader

from jackfield.errors import ConfigError, OperatorError, did_you_mean
from jackfield_operator_data_juicer import guard
from jackfield_operator_data_juicer.config import unknown_name

#: Operators that are no operators on rows.
_NOT_ROWS = {"Grouper": "it makes one row of many", "Aggregator": "it needs rows that a grouper has joined"}


def refusal(name: str, why: str) -> OperatorError:
    """Return the error of an operator that cannot be used here."""
    fix = "leave it out, or use an operator of Jackfield; docs/guides/data_juicer.md lists those that can be used"
    details: Any = {"where": name, "expected": "an operator without model, network or other programs", "fix": fix}
    return OperatorError(f"Data-Juicer's {name} cannot be used", code="operator.refused", found=why, **details)


def operator_class(name: str) -> type[OP]:
    """Return the class of an operator; raise ``config.invalid-value`` if there is none."""
    if name not in OPERATORS.modules:
        what = unknown_name(name, list(OPERATORS.modules))
        raise ConfigError(what, where="op", expected="a name of docs/reference/data_juicer.md", found=name)
    cls: type[OP] = OPERATORS.modules[name]
    return cls


def kind_of(cls: type[OP]) -> str:
    """Return which of Data-Juicer's types a class is: Filter, Mapper and so on."""
    return next(each.__name__ for each in cls.__mro__ if each.__module__ == "data_juicer.ops.base_op")


def make(name: str, settings: Mapping[str, Any]) -> OP:
    """Make an operator; refuse what needs a model, the network, another program or a package that is missing."""
    cls = operator_class(name)
    if (why := _NOT_ROWS.get(kind_of(cls))) or (why := "it needs Data-Juicer's own Ray" if "ray_" in name else None):
        raise refusal(name, why)
    if kind_of(cls) not in ("Filter", "Mapper", "Deduplicator", "Selector"):
        raise refusal(name, f"it is a {kind_of(cls)}")
    known = {
        *cls._BASE_PARAMS,
        *(
            each
            for one in cls.__mro__
            for each in inspect.signature(vars(one).get("__init__", object.__init__)).parameters
        ),
    }
    if unknown := sorted(settings.keys() - known):  # which it would ignore
        what = f"Data-Juicer's {name} has no setting {unknown[0]!r}{did_you_mean(unknown[0], known)}"
        raise ConfigError(what, code="config.unknown-key", where=f"settings.{unknown[0]}", found=unknown[0])
    with Offline(cls) as seen:
        try:
            import data_juicer.core.data  # noqa: F401 - operators import it when they are made, and packages with it

            made = cls(**copy.deepcopy(dict(settings)))
        except Exception as error:
            if seen or isinstance(error, ImportError):
                raise refusal(name, seen[0] if seen else f"{type(error).__name__}: {error}") from error
            found = f"{type(error).__name__}: {error}"
            what = f"Data-Juicer's {name} refuses its settings"
            raise ConfigError(what, where="settings", expected="its settings", found=found) from error
    if seen:
        raise refusal(name, seen[0])
    return made


class Offline:
    """Have neither a package installed nor a model loaded in a block, and yield what was refused."""

    def __init__(self, cls: type[OP]) -> None:
        self._modules = [sys.modules[each.__module__] for each in cls.__mro__ if each.__module__ in sys.modules]

    def __enter__(self) -> list[str]:
        self._closed = guard.closed()
        seen = self._closed.__enter__()
        self._before = [(place, "_install_package", vars(LazyLoader)["_install_package"]) for place in [LazyLoader]]
        LazyLoader._install_package = staticmethod(lambda spec, *_, **__: guard.refuse(f"it needs the package {spec}"))
        for module in self._modules:
            if (loads := vars(module).get("prepare_model")) is not None:
                self._before.append((module, "prepare_model", loads))
                vars(module)["prepare_model"] = _no_model
        return seen

    def __exit__(self, *error: Any) -> None:
        for place, name, value in reversed(self._before):
            setattr(place, name, value)
        self._closed.__exit__(*error)


def _no_model(model_type: str, **_: Any) -> None:
    guard.refuse(f"it needs a model ({model_type})")


def thresholds(cls: type[OP]) -> frozenset[str]:
    """Return the settings of a filter that only its decision reads, as its code shows.

    Such a setting is kept as it is in an attribute, which no method that computes statistics reads.
    """
    if not issubclass(cls, Filter) or cls._name in NON_STATS_FILTERS.modules:
        return frozenset()
    methods = {name: node for each in reversed(cls.__mro__) if is_own(each) for name, node in _methods(each)}
    read, pending = set[str](), [name for name in methods if name.startswith("compute_stats")]
    known = set(pending)
    while pending:
        used = {name for node in ast.walk(methods[pending.pop()]) if (name := _of_self(node))}
        read |= used
        pending += [name for name in used & methods.keys() if name not in known]
        known |= used & methods.keys()
    found = {"min_closed_interval", "max_closed_interval", "reversed_range"}
    if (init := methods.get("__init__")) is not None:
        names = [each.arg for each in (*init.args.args[1:], *init.args.kwonlyargs)]
        kept = [node for node in ast.walk(init) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)]
        for name in names:
            uses = [node for node in ast.walk(init) if isinstance(node, ast.Name) and node.id == name]
            places = [node for node in kept if any(node.value is use for use in uses)]
            kept_in = [own for node in places for target in node.targets if (own := _of_self(target))]
            if len(uses) == len(places) == len(kept_in) == 1 and kept_in[0] not in read:
                found.add(name)
    return frozenset(found)


def _methods(cls: type) -> Iterator[tuple[str, ast.FunctionDef]]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node


def _of_self(node: ast.AST) -> str:
    """Return the name of an attribute of ``self``, otherwise an empty text."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return str(getattr(node, "attr", "")) if own else ""


def is_own(cls: type) -> bool:
    """Return whether a class is of an operator, and not a base of all."""
    return cls.__module__.startswith("data_juicer.ops.") and cls.__module__ != "data_juicer.ops.base_op"

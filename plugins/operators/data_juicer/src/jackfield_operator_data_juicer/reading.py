"""Reads the code of Data-Juicer's operators: the columns, tags and models that they use, and what only decides."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from data_juicer.ops import OPERATORS
from data_juicer.ops.base_op import NON_STATS_FILTERS, OP, TAGGING_OPS, Filter

#: Settings of columns that an operator makes, or can do without, though its code looks as if it read them.
_APART = {
    "latex_figure_context_extractor_mapper": (
        "image_key",
        "caption_key",
        "label_key",
        "context_key",
        "parent_caption_key",
        "parent_label_key",
    ),
    "pii_redaction_mapper": ("messages_key",),
}


def is_own(cls: type) -> bool:
    """Return whether a class is of an operator, and not a base of all."""
    return cls.__module__.startswith("data_juicer.ops.") and cls.__module__ != "data_juicer.ops.base_op"


_TREES = dict[type, tuple[ast.ClassDef, ...]]()


def _trees(cls: type[OP]) -> tuple[ast.ClassDef, ...]:
    """Return the code of a class and of its bases that are of operators."""
    if cls not in _TREES:
        found = [ast.parse(textwrap.dedent(inspect.getsource(each))).body[0] for each in filter(is_own, cls.__mro__)]
        _TREES[cls] = tuple(each for each in found if isinstance(each, ast.ClassDef))
    return _TREES[cls]


def _nodes(cls: type[OP]) -> Iterator[ast.AST]:
    return (node for tree in _trees(cls) for node in ast.walk(tree))


def column_settings(cls: type[OP]) -> tuple[str, ...]:
    """Return the settings ``*_key`` that name columns which the code reads.

    Those by which it only writes, or that name tags, are none of them, nor are those of columns with bytes, which no
    row has.
    """
    other = set[int]()
    for node in _nodes(cls):
        if isinstance(node, ast.Subscript) and (isinstance(node.ctx, ast.Store) or _is_tags(node.value)):
            other.add(id(node.slice))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_tags(node.func.value):
            other |= {id(each) for each in node.args}
    read = [
        _of_self(node)
        for node in _nodes(cls)
        if isinstance(getattr(node, "ctx", None), ast.Load) and id(node) not in other
    ]
    apart = _APART.get(cls._name, ())
    return tuple(
        dict.fromkeys(name for name in read if name.endswith("_key") and "_bytes_" not in name and name not in apart)
    )


def _is_tags(node: ast.AST) -> bool:
    return ast.unparse(node) in ("meta", "sample[Fields.meta]")


def reads_fields(cls: type[OP]) -> bool:
    """Return whether the code reads columns that settings ``*_field`` or ``*_keys`` name."""
    return any(_of_self(node).endswith(("_field", "_keys")) for node in _nodes(cls))


def names_field(cls: type[OP], field: str) -> bool:
    """Return whether the code names one of Data-Juicer's own columns, such as ``Fields.meta``."""
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == field for node in _nodes(cls))


def uses_tags(cls: type[OP]) -> bool:
    """Return whether the code reads or writes the tags of a sample."""
    return cls._name in TAGGING_OPS.modules or names_field(cls, "Fields.meta")


def models(cls: type[OP]) -> tuple[str, ...]:
    """Return the kinds of models that the code prepares, itself or by other operators that it makes."""
    found, others = list[str](), list[str]()
    for node in _nodes(cls):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "prepare_model":
            kinds = [each.value for each in node.keywords if each.arg == "model_type"] + node.args[:1]
            found += [str(kind.value) for kind in kinds if isinstance(kind, ast.Constant)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPERATORS.modules:
            others.append(node.value)
    within = [kind for name in others if name != cls._name for kind in models(OPERATORS.modules[name])]
    return tuple(dict.fromkeys((*found, *within)))


def thresholds(cls: type[OP]) -> frozenset[str]:
    """Return the settings of a filter that only its decision reads, as its code shows.

    Such a setting is kept as it is in an attribute, which no method that computes statistics reads.
    """
    if not issubclass(cls, Filter) or cls._name in NON_STATS_FILTERS.modules:
        return frozenset()
    methods = {
        node.name: node for tree in reversed(_trees(cls)) for node in tree.body if isinstance(node, ast.FunctionDef)
    }
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


def _of_self(node: ast.AST) -> str:
    """Return the name of an attribute of ``self``, otherwise an empty text."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return str(getattr(node, "attr", "")) if own else ""

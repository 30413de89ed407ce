"""How a user's reward function is called, which is found out from its signature.

It is loaded by its path in the worker processes of ``jackfield_user_code``, in any interpreter: it needs only the
standard library.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

STANDARD = ("data_source", "solution_str", "ground_truth", "extra_info")
#: further fields of a ``ScoreRequest`` that a parameter may name
FIELDS = (
    *(
        "prompt_str",
        "response_ids",
        "idempotency_key",
        "retry",
        "deadline_seconds",
        "group_id",
        "group_size",
        "messages",
    ),
    *("parts", "response_mask", "turns", "metrics", "tool_calls", "images", "priority", "model_text", "tool_text"),
)
TRL = ("prompts", "completions", "completion_ids", "completions_ids")
#: what ``score_group`` and TRL's columns are made from
_WHOLE = (*STANDARD, *(name for name in FIELDS if name not in ("images", "response_mask")))
_COLUMNS = (*STANDARD, "prompt_str", "messages", "parts", "response_ids")
_ACCEPTED = (
    "compute_score(data_source, solution_str, ground_truth, extra_info), with any of these and of "
    f"{', '.join(FIELDS)}; or TRL's reward(prompts, completions, **columns); sync or async"
)
_RESULT = "a number, a dict with 'score', (score, solution, explanation) or (score, dict)"

#: what None of a TRL function means: it does not apply to this sample, and TRL's sum of rewards leaves it out
_NOTHING = {"score": 0.0, "metrics": {"not_applicable": 1.0}, "explanation": "None: the function does not apply"}

Function = Callable[..., Any]
_CALL = "__call__"


class Refused(Exception):
    """A reward function that cannot be called."""

    def __init__(self, message: str, found: str, where: str, expected: str = _ACCEPTED, fix: str | None = None) -> None:
        super().__init__(message)
        self.refusal = {"code": "reward.function", "message": message, "where": where, "found": found}
        self.refusal |= {"expected": expected, "fix": fix or "change the function, or name another one in reward.path"}


class Wrong(Exception):
    """A result that is not a score."""

    def __init__(self, message: str, found: Any, expected: str = _RESULT) -> None:
        super().__init__(message)
        shown = (
            "a coroutine that was not awaited" if inspect.iscoroutine(found) else f"{type(found).__name__} {found!r}"
        )
        if inspect.iscoroutine(found):
            found.close()
        self.answer = {"wrong": message, "found": shown[:200], "expected": expected}


def adapt(target: Any, module: Any, request: Mapping[str, Any]) -> tuple[dict[str, Function], dict[str, Any]]:
    """Return the functions ``score``, ``group`` and ``post`` as far as there are such, and what they need."""
    keywords, found = dict(request["keywords"]), target
    if inspect.isclass(target):
        found, keywords = _constructed(target, keywords), {}
    about: dict[str, Any] = {"group": False, "style": "score"}
    functions: dict[str, Function] = {}
    if hasattr(found, "score_rollout") and hasattr(found, "class_objects"):
        _add_rubric(found, functions, about)
    else:
        own = None if inspect.isroutine(found) or isinstance(found, functools.partial) else found
        one, many = _methods(found, own, request["method"], target)
        if many is not None:
            _check(many, "score_group")
            functions["group"] = _called(many, lambda data: ([data["requests"]], {}), _scores)
            about |= {"group": True, "needs": _WHOLE}
        elif one is not None:
            _add_function(one, keywords, functions, about)
        found = own
    post = getattr(found, "post_process_scores", None) or getattr(module, "post_process_scores", None)
    if post is not None and callable(post):
        parameter = _check(post, "post_process_scores")
        functions["post"] = _called(post, lambda data: ([data["scores"]], {}), _processed)
        about["nan"] = "float" in parameter and not any(word in parameter for word in ("None", "Optional"))
    return functions, about


def _constructed(cls: type, keywords: dict[str, Any]) -> Any:
    try:
        signature = inspect.signature(cls)
    except ValueError:  # built in
        return cls(**keywords)
    try:
        signature.bind(**keywords)
    except TypeError as error:
        found = f"{cls.__name__}{signature}: {error}"
        expected = f"a constructor that takes the keywords {sorted(keywords)}" if keywords else "one without arguments"
        fix = "give its arguments as reward.keywords"
        raise Refused("a reward's class cannot be constructed", found, _where(cls), expected, fix) from error
    return cls(**keywords)


def _methods(found: Any, own: Any, method: str, target: Any) -> tuple[Any, Any]:
    """Return the function that scores a sample, and the one that scores a group."""
    if own is None:
        return found, None
    many = getattr(own, "score_group", None)
    one = getattr(own, method, None) or (own if callable(own) else None)
    if many is None and one is None:
        kind = target if inspect.isclass(target) else type(own)
        there = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        found = f"{kind.__name__} with {', '.join(there) or 'no method'}"
        expected = f"a method {method!r}, 'score_group' or '__call__'"
        raise Refused("a reward's class has no method that scores", found, _where(kind), expected)
    return one, many


def _where(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(type(function), _CALL, function)
    try:
        lines = inspect.getsourcelines(function)[1]
        return f"{inspect.getsourcefile(function)}:{lines}"
    except (TypeError, OSError):
        return getattr(function, "__qualname__", repr(function))


def _signature(function: Function) -> tuple[inspect.Signature, str]:
    """Return the signature of a function, and the function as it is written; refuse generators."""
    name = getattr(function, "__name__", None) or getattr(getattr(function, "func", None), "__name__", None)
    name = name or type(function).__name__
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise Refused("a reward cannot be called", repr(function), _where(function)) from error
    plain = inspect.isroutine(function) or isinstance(function, functools.partial)
    call = function if plain else getattr(function, _CALL, function)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        found = f"def {name}{signature} with yield"
        raise Refused(
            "a reward is a generator function", found, _where(function), _ACCEPTED, "return the score instead"
        )
    return signature, f"def {name}{signature}"


def _check(function: Function, name: str) -> str:
    """Require a function of one argument, and return its parameter as it is written."""
    signature, found = _signature(function)
    try:
        signature.bind([])
    except TypeError as error:
        expected = f"{name}({'scores' if name.startswith('post') else 'requests'}), returning a list"
        raise Refused(f"{name} has a wrong signature", f"{found}: {error}", _where(function), expected) from error
    return str(next(iter(signature.parameters.values())))


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, _CALL, None))


def _called(function: Function, arguments: Callable[[Any], Any], finish: Callable[[Any, Any], Any]) -> Function:
    """Return a function of a request's data that calls another one and converts its result."""

    def finished(value: Any, data: Any) -> Any:
        try:
            return finish(value, data)
        except Wrong as wrong:
            return wrong.answer

    async def awaited(call: Any, data: Any) -> Any:
        try:
            value = await call
        except Wrong as wrong:
            return wrong.answer
        return finished(value, data)

    def call(**data: Any) -> Any:
        positional, named = arguments(data)
        value = function(*positional, **named)
        return awaited(value, data) if inspect.isawaitable(value) else finished(value, data)

    async def call_async(**data: Any) -> Any:
        positional, named = arguments(data)
        return await awaited(function(*positional, **named), data)

    return call_async if _is_async(function) else call


def _add_function(
    function: Function, keywords: Mapping[str, Any], functions: dict[str, Function], about: dict[str, Any]
) -> None:
    signature, found = _signature(function)
    if inspect.isfunction(function) and next(iter(signature.parameters), "") == "self":  # as in a recipe of verl
        function = functools.partial(function, None)
        signature = inspect.signature(function)
    parameters = signature.parameters.values()
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if unknown := sorted(set(keywords) - set(names)) if not open_ended else []:
        message = f"a reward function does not take the keyword {unknown[0]!r}"
        raise Refused(message, found, _where(function), ", ".join(names), "correct reward.keywords")
    is_trl = bool(set(TRL) & set(names)) and "solution_str" not in names
    known = {*TRL, *STANDARD, *FIELDS} if is_trl else {*STANDARD, *FIELDS}
    required = [each.name for each in parameters if each.default is each.empty and each.name in names]
    missing = [name for name in required if name not in known and name not in keywords]
    taken = [name for name in names if name in known and name not in keywords]
    if (missing and not is_trl) or not (taken or open_ended):
        message = f"a reward function has the parameter {missing[0]!r}, which has no value" if missing else ""
        message = message or "a reward function takes nothing of a sample"
        raise Refused(message, found, _where(function), _ACCEPTED, "rename it, give it a default or reward.keywords")
    if is_trl:
        columns = None if open_ended else [name for name in names if name not in keywords]
        arguments = functools.partial(_columns, dict(keywords), columns, missing, found)
        functions["group"] = _called(function, arguments, functools.partial(_scores, nothing=_NOTHING))
        about |= {"group": True, "style": "trl", "needs": _COLUMNS}
        return
    needs = list(dict.fromkeys([*taken, *(STANDARD if open_ended else ())]))
    only = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY and each.name in taken]
    named = [name for name in needs if name not in only]

    def bound(data: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [data[name] for name in only], {**{name: data[name] for name in named}, **keywords}

    functions["score"] = _called(function, bound, _score)
    about["needs"] = needs


def _columns(
    keywords: dict[str, Any], names: Sequence[str] | None, required: Sequence[str], found: str, data: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return TRL's arguments: lists with one value for each sample of a group."""
    rows = [each["extra_info"] for each in data["requests"]]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    columns |= {name: [each[name] for each in data["requests"]] for name in STANDARD}
    ids = [list(each["response_ids"]) for each in data["requests"]]
    columns |= {"prompts": [], "completions": [], "completion_ids": ids, "completions_ids": ids}
    for row in data["requests"]:
        prompt, completion = _texts(row, data["form"])
        columns["prompts"].append(prompt)
        columns["completions"].append(completion)
    columns = {name: values for name, values in columns.items() if name not in ("prompt", "completion")}
    if missing := [name for name in required if name not in columns]:
        raise LookupError(f"{found} needs the column {missing[0]!r}; the task's record has {sorted(columns)}")
    given = columns if names is None else {name: columns[name] for name in names if name in columns}
    return [], {**given, **keywords}


def _texts(row: Mapping[str, Any], form: str) -> tuple[Any, Any]:
    """Return prompt and completion, as messages if the prompt, or TRL's column of it, is a conversation, else texts."""
    if form == "auto" and isinstance(text := row["extra_info"].get("prompt"), str):
        return text, row["solution_str"]
    if form == "text" or (form == "auto" and not row["messages"]):
        return row["prompt_str"], row["solution_str"]
    parts = row["parts"] or [{"author": "model", "text": row["solution_str"]}]
    roles = {"model": "assistant", "tool": "tool"}
    completion = [{"role": roles[part["author"]], "content": part["text"]} for part in parts]
    return row["messages"] or [{"role": "user", "content": row["prompt_str"]}], completion


def _add_rubric(rubric: Any, functions: dict[str, Function], about: dict[str, Any]) -> None:
    """Add a rubric of ``verifiers`` 0.1, whose own methods score an error of a function as 0."""
    rubrics = [each for each in (*getattr(rubric, "rubrics", ()), rubric) if each.funcs]
    pairs = [(each, func, weight) for each in rubrics for func, weight in zip(each.funcs, each.weights, strict=True)]
    if not pairs:
        raise Refused("a rubric has no reward function", repr(rubric), _where(type(rubric)), "a Rubric with funcs")
    plural = ("states", "prompts", "completions", "answers", "tasks", "infos")
    groups = {func: bool(set(plural) & set(_signature(func)[0].parameters)) for _, func, _ in pairs}

    def arguments(each: Any, func: Function, states: list[dict[str, Any]]) -> dict[str, Any]:
        objects: dict[str, Any] = {**states[0]["info"], **states[0], "state": states[0], **each.class_objects}
        if groups[func]:
            objects = {"states": states, **each.class_objects}
            objects |= {name: [state[name[:-1]] for state in states] for name in plural[1:]}
        parameters = inspect.signature(func).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return objects
        return {name: value for name, value in objects.items() if name in parameters}

    def finish(values: list[Any], states: list[dict[str, Any]]) -> list[Any]:
        found = []
        for number in range(len(states)):
            scores = [_number(each[number], func.__name__) for (_, func, _), each in zip(pairs, values, strict=True)]
            metrics = {func.__name__: one for (_, func, _), one in zip(pairs, scores, strict=True)}
            score = sum(weight * one for (_, _, weight), one in zip(pairs, scores, strict=True))
            found.append({"score": score, "metrics": metrics})
        return found

    async def score(requests: list[dict[str, Any]], form: str) -> list[Any]:
        states = [_state(row, form) for row in requests]
        values = []
        for each, func, _ in pairs:
            called = (
                [func(**arguments(each, func, states))]
                if groups[func]
                else [func(**arguments(each, func, [state])) for state in states]
            )
            called = [await one if inspect.isawaitable(one) else one for one in called]
            values.append(_listed(called[0], len(states)) if groups[func] else called)
        return finish(values, states)

    def one_by_one(requests: list[dict[str, Any]], form: str) -> Any:
        return score(requests, form)

    call = score if any(map(_is_async, groups)) else one_by_one
    functions["group"] = _called(call, lambda data: ([data["requests"], data["form"]], {}), lambda value, _: value)
    about |= {"group": any(groups.values()), "style": "verifiers", "needs": _COLUMNS}


def _state(row: Mapping[str, Any], form: str) -> dict[str, Any]:
    prompt, completion = _texts(row, form)
    state = {"prompt": prompt, "completion": completion, "answer": row["ground_truth"], "info": row["extra_info"]}
    return {**state, "task": row["data_source"], "trajectory": [], "metrics": {}, "reward": None}


def _listed(value: Any, count: int) -> list[Any]:
    if hasattr(value, "tolist"):  # of NumPy or torch
        value = value.tolist()
    expected = f"a list of {count} scores, one per rollout"
    if not isinstance(value, list | tuple):
        raise Wrong("the result for a group is not a list", value, expected)
    if len(value) != count:
        raise Wrong(f"the result for a group of {count} has {len(value)} values", value, expected)
    return list(value)


def _scores(value: Any, data: Mapping[str, Any], nothing: dict[str, Any] | None = None) -> list[Any]:
    return [
        nothing if each is None and nothing is not None else _score_or_wrong(each, row)
        for each, row in zip(_listed(value, len(data["requests"])), data["requests"], strict=True)
    ]


def _score_or_wrong(value: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _score(value, row)
    except Wrong as wrong:
        return wrong.answer


def _processed(value: Any, data: Mapping[str, Any]) -> list[Any]:
    """Return a number or None for each rollout; NaN is None."""
    found: list[Any] = []
    for each in _listed(value, len(data["scores"])):
        is_none = each is None or (isinstance(each, float) and math.isnan(each))
        try:
            found.append(None if is_none else _number(each, "a score of post_process_scores"))
        except Wrong as wrong:
            found.append(wrong.answer)
    return found


def _score(value: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return score, metrics, explanation and dimensions of what a function returned."""
    if isinstance(value, tuple):
        return _of_tuple(value, data)
    if not isinstance(value, Mapping):
        return {"score": _number(value, "the result")}
    if "score" not in value:
        raise Wrong("the result has no 'score'", f"keys {sorted(map(str, value))}")
    found: dict[str, Any] = {"score": _number(value["score"], "the score"), "metrics": {}}
    for name, each in value.items():
        if name == "explanation":
            found["explanation"] = None if each is None else str(each)
        elif name == "dimensions" and isinstance(each, Mapping):
            found["dimensions"] = {str(key): _number(one, f"dimension {key!r}") for key, one in each.items()}
        elif name != "score":
            found["metrics"][str(name)] = _number(each, f"metric {name!r}")
    return found


def _of_tuple(value: tuple[Any, ...], data: Mapping[str, Any]) -> dict[str, Any]:
    if len(value) == 2 and isinstance(value[1], Mapping):
        return _score({**value[1], "score": value[0]}, data)
    if len(value) not in (2, 3) or not all(isinstance(each, str | None) for each in value[1:]):
        raise Wrong(f"the result is a tuple of {len(value)} values of other types", value)
    is_response = len(value) == 3 and value[2] == data.get("solution_str")  # (score, query, response)
    return {"score": _number(value[0], "the score"), "explanation": None if is_response else value[-1]}


def _number(value: Any, what: str) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of NumPy or torch
        value = value.item()
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise Wrong(f"{what} is not a finite number", value)
    return float(value)

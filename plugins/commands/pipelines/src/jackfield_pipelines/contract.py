"""What operators do that their contract does not allow, and what of it costs no more than a row."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from jackfield.abc.operator import OperatorResult, OperatorType
from jackfield.errors import JackfieldError, OperatorError

CONTRACT = "operator.contract"  #: the code of a result that the contract does not allow
_LARGEST, _LARGEST_REWARD = sys.float_info.max, 3.4e38  #: that of a float32, as rewards are
_FREE = 20  #: rows that may be set aside, however few there are


def broken(name: str, what: str, expected: str, found: str) -> OperatorError:
    """Return the error of an operator that does what the contract does not allow."""
    fix = "correct the operator; `jackfield plugins check` says what else is wrong with it"
    details: Any = {"where": name, "expected": expected, "found": found, "fix": fix}
    return OperatorError(f"the operator gave {what}", code=CONTRACT, **details)


def is_hosts(error: BaseException) -> bool:
    """Return whether an error that came through an operator is not its own: a cancellation, Ctrl-C, a closed task."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, GeneratorExit)


@contextmanager
def rows_errors(name: str) -> Iterator[None]:
    """Turn what an operator raises to end the program into an error that costs its rows."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or is_hosts(error):
            raise
        raise OperatorError(f"the operator raised {error!r}", where=name) from error


@contextmanager
def stages_errors(name: str, when: str) -> Iterator[None]:
    """Name the operator that raised an error of its own where no rows could be at fault."""
    try:
        yield
    except (JackfieldError, OSError):
        raise
    except BaseException as error:
        if is_hosts(error):
            raise
        raise broken(name, f"an error {when}", "no error", f"{type(error).__name__}: {error}") from error


def without_odd_numbers(result: OperatorResult, kind: OperatorType, *, rewards: bool = False) -> OperatorResult:
    """Set aside rows with numbers that JSON does not have, with a score that is no number, or with no such reward.

    ``rewards`` says that the column ``reward`` is that of an experience.
    """
    odd = {key: why for key, values in result.updates.items() if (why := _odd(values, kind == "scorer", rewards))}
    if not odd:
        return result
    updates = {key: values for key, values in result.updates.items() if key not in odd}
    gone = {key: why for key, why in odd.items() if key not in result.removed}
    return attrs.evolve(result, updates=updates, set_aside={**gone, **result.set_aside})


def _odd(values: Mapping[str, Any], scores: bool, rewards: bool) -> str:
    """Return what is wrong with the values of a row; a score may be null, and a reward not even that."""
    for name, value in values.items():
        largest, needs, is_good = _LARGEST, scores and value is not None, True
        if rewards and name == "reward":
            largest, needs, is_good = _LARGEST_REWARD, True, not isinstance(value, bool)
        is_good &= abs(value) <= largest if isinstance(value, int | float) else not needs
        if not is_good:
            return f"the operator gave {value!r:.200} as {name}, which is no finite number"
    return ""


def refuse_many(name: str, aside: float, done: int, share: float, reason: str) -> None:
    """Raise ``operator.set-aside`` if an operator has set aside more rows of those so far than it may."""
    if aside > max(_FREE, share * done):
        details: Any = {"where": name, "expected": f"at most {share:.0%} of the rows", "found": reason}
        fix = "correct the rows or the operator's settings, or raise data.pipeline.maximum_set_aside"
        raise OperatorError(f"{aside:.0f} of {done} rows were set aside", code="operator.set-aside", fix=fix, **details)

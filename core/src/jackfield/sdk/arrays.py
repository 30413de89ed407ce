"""Named NumPy arrays as bytes: a model's inputs beside tokens, such as ``pixel_values``.

So they are kept in queues and sent between processes. The bytes are those of a safetensors file, which holds data
only: no pickle, no class names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jackfield.errors import AgentError, DataError, QueueError
from jackfield.sdk.cells import Cell

if TYPE_CHECKING:
    import numpy as np

Arrays: TypeAlias = "dict[str, np.ndarray[Any, Any]]"

MAXIMUM_ARRAYS = 64  #: in one mapping
MAXIMUM_BYTES = 1 << 28  #: of one mapping; between processes, a message has at most 64 MiB
_KINDS = "biuf"  #: truth values, integers and floating-point numbers


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Return arrays as bytes; no arrays are bytes, too.

    Raise ``agent.output`` for a name that is no text, a value that is no NumPy array of numbers of at most 8 bytes
    with one dimension at least, and for more than 64 arrays or 256 MiB.
    """
    import numpy as np
    from safetensors.numpy import save

    for name, array in arrays.items():
        if not isinstance(name, str) or not name:
            raise _refusal("the name of an array is not a text", "such as pixel_values", repr(name)[:200])
        if not isinstance(array, np.ndarray):
            raise _refusal(f"{name!r} is not a NumPy array", "numpy.ndarray", type(array).__name__)
        if array.dtype.kind not in _KINDS or array.dtype.itemsize > 8 or not array.ndim:
            found = f"{array.dtype}, {array.ndim} dimensions"
            raise _refusal(f"{name!r} is not an array of numbers", "plain numbers, one dimension at least", found)
    size = sum(array.nbytes for array in arrays.values())
    if len(arrays) > MAXIMUM_ARRAYS or size > MAXIMUM_BYTES:
        expected = f"at most {MAXIMUM_ARRAYS} arrays and {MAXIMUM_BYTES >> 20} MiB"
        raise _refusal("the arrays are too large", expected, f"{len(arrays)} arrays, {size} bytes")
    return bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arrays of both, the second one's behind the first one's along their first dimension.

    Raise ``data.image`` if both have arrays of other names or sizes.
    """
    if not first or not second:
        return first or second
    import numpy as np

    sizes = [{name: array.shape[1:] for name, array in each.items()} for each in (first, second)]
    if sizes[0] != sizes[1]:
        raise DataError("images do not fit those before", code="data.image", expected=sizes[0], found=sizes[1])
    return {name: np.concatenate([array, second[name]]) for name, array in first.items()}


def cell(arrays: Mapping[str, Any]) -> Cell:
    """Return packed arrays as the value of a sample in the column ``multi_modal_inputs``: jagged uint8."""
    return '["jagged","uint8",[]]', pack(arrays)


def unpack(content: bytes | bytearray | memoryview) -> Arrays:
    """Return the arrays of :func:`pack`, which cannot be written to; ``queue.store`` if these are not its bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Arrays = load(bytes(content))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        expected, found = "the bytes of a safetensors file", f"{len(content)} bytes: {error}"
        raise QueueError("bytes are not packed arrays", code="queue.store", expected=expected, found=found) from error
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _refusal(message: str, expected: str, found: str) -> AgentError:
    fix = "give each input of the model as a NumPy array, by its name"
    return AgentError(message, code="agent.output", where="arrays", expected=expected, found=found, fix=fix)

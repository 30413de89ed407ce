"""What a run and a pipeline service say to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, BinaryIO

import attrs
import msgspec
import xxhash

from jackfield.data.formats import TaskFormat
from jackfield.sdk.rpc import Contract
from jackfield_pipelines.made import MadeRow
from jackfield_pipelines.stages import Limits

ADDRESS_FILE = "address.json"
NAME = "the pipeline service"
SERVICE = "pipelines 1"  #: with the version of what travels in :meth:`PipelineService.add` and ``shape``
FRAME_BYTES = 4 * 2**20  #: of rows in one message
Operators = Sequence[Mapping[str, Any]]  #: with name and settings, as in a run's file


@attrs.frozen(kw_only=True)
class SourceFile:
    """A file of JSON lines that a run has."""

    digest: str  #: XXH3-128 of its content
    name: str  #: by which a person knows it
    stem: str  #: beginning of the keys of its rows


@attrs.frozen(kw_only=True)
class TaskJob:
    """The operators of ``data.pipeline.tasks``, and what they are applied to."""

    operators: Operators
    files: Sequence[SourceFile]
    form: TaskFormat  #: of the records
    columns: Mapping[str, str]  #: names of the columns (see ``OperatorContext.columns``)
    seed: int
    limits: Limits
    rows: int  #: of a request
    seconds: float  #: deadline of a request
    concurrent: int = 1  #: requests at a time
    before: Mapping[str, str] | None = None  #: folder and digest of the set that the only file is


@attrs.frozen(kw_only=True)
class Told:
    """A stage that is complete; without a name, a sign that the service is at work."""

    name: str = ""  #: of the set's folder
    digest: str = ""  #: of the set
    chain: str = ""  #: name of the folder that has the set, for :meth:`PipelineService.read`
    place: str = ""  #: path of the set's folder at the service
    was_there: bool = False


@attrs.frozen(kw_only=True)
class ExperienceJob:
    """The operators of ``data.pipeline.experiences``. Runs with equal ones share those that do not learn."""

    operators: Operators
    seed: int
    steps: int  #: training steps of the run
    seconds: float  #: deadline of a request
    set_aside: float = Limits().set_aside  #: most of the rows that an operator may set aside, as a share


@attrs.frozen(kw_only=True)
class Opened:
    """What a run needs to know of its operators."""

    reads: Sequence[str]
    states: list[Any] | None  #: of new operators; None: the run has given states
    operators: Sequence[Mapping[str, Any]] = ()  #: their names, versions and settings
    samples: Sequence[str] = ()  #: names of those that make samples


@attrs.frozen(kw_only=True)
class ShapeRequest:
    """Scored samples of whole groups of a batch."""

    records: Mapping[str, dict[str, Any]]
    batch: int


@attrs.frozen(kw_only=True)
class ShapeReply:
    """What became of them, and what the run keeps for the case that the service dies."""

    columns: dict[str, dict[str, Any]]
    removed: dict[str, str]
    made: tuple[MadeRow, ...]
    states: list[Any]  #: of the operators, after the request
    counted: list[tuple[str, float]]  #: names of counters, and numbers


class PipelineService:
    """The methods that a run calls. All of them may be called again after a lost connection."""

    async def size(self, digest: str) -> int:
        """Return how many bytes of a file are there."""
        raise NotImplementedError

    async def upload(self, digest: str, offset: int, part: bytes) -> int:
        """Append a part of a file if ``offset`` is its size; return the size."""
        raise NotImplementedError

    def prepare(self, job: TaskJob, beat: float) -> AsyncIterator[Told]:
        """Apply operators to files; yield each complete stage, and a sign of life every ``beat`` seconds."""
        raise NotImplementedError

    def read(self, chain: str, name: str, file: str, offset: int) -> AsyncIterator[bytes]:
        """Yield a file of a set from an offset on, in frames."""
        raise NotImplementedError

    async def open(self, job: ExperienceJob, restores: bool) -> Opened:
        """Make the operators of this connection, in the place of earlier ones.

        If it ``restores``, those that learn go on from the states that were added, an encoded list.
        """
        raise NotImplementedError

    async def add(self, part: bytes, further: bool) -> None:
        """Keep a part of what the next call needs, encoded; ``further`` ones follow others."""
        raise NotImplementedError

    def shape(self) -> AsyncIterator[bytes]:
        """Process the request that was added; yield the encoded reply in frames."""
        raise NotImplementedError

    async def overview(self) -> list[dict[str, Any]]:
        """Return what the service is doing, for people."""
        raise NotImplementedError


CONTRACT = Contract(PipelineService)


def encode(value: Any) -> bytes:
    """Encode plain values and instances of the classes above."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy" and value.shape == ():
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def digest_of(file: BinaryIO) -> str:
    """Return the digest of a file's content, from its beginning."""
    digest = xxhash.xxh3_128()
    file.seek(0)
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()

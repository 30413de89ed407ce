"""The operator ``data_juicer``. Data-Juicer is imported when it is made, in the interpreter that has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

from jackfield.abc.operator import Operator, OperatorContext, OperatorRequest, OperatorResult, OperatorType, Row
from jackfield_operator_data_juicer.config import DataJuicerConfig

#: What operators read by default, as usual names of columns, by the settings with which Data-Juicer names them.
_USUAL = {
    "text_key": "prompt",
    "query_key": "prompt",
    "prompt_key": "prompt",
    "instruction_key": "prompt",
    "response_key": "response",
}


class DataJuicer(Operator):
    """One operator of Data-Juicer: a filter, mapper, deduplicator or selector."""

    type: ClassVar[OperatorType] = "mapper"  #: of an object, it is that of its operator
    decides_by: ClassVar[tuple[str, ...]] = ("thresholds",)

    def __init__(self, config: DataJuicerConfig, context: OperatorContext) -> None:
        super().__init__(config, context)
        config.check_name()
        from jackfield_operator_data_juicer.bridges import bridge_of

        columns = {**{key: context.column(name) for key, name in _USUAL.items()}, **config.columns}
        made = bridge_of(config.op, {**config.settings, **config.thresholds}, columns, context.seed)
        made.check_thresholds(config.thresholds)
        self._bridge = made
        self.type = made.type  # type: ignore[misc]

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns of the operator's keys, or all."""
        return self._bridge.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Statistics of a filter; a mapper may write any column."""
        return self._bridge.writes

    @property
    def compares(self) -> bool:
        """Return whether Data-Juicer applies the operator to all rows together."""
        return self._bridge.compares

    @property
    def version(self) -> str:
        """Return the version of Data-Juicer."""
        return f"py-data-juicer {version('py-data-juicer')}"

    async def process(self, request: OperatorRequest) -> OperatorResult:
        """Compute statistics, change rows, or compare them."""
        if not request.rows:
            return OperatorResult()
        return self._bridge.process(request.rows)

    def decide(self, rows: Sequence[Row]) -> Mapping[str, str]:
        """Apply the decision of a filter or selector."""
        return self._bridge.decide(rows)

    def state(self) -> Any:
        """Return what a deduplicator remembers of earlier rows."""
        return self._bridge.state()

    def restore(self, state: Any) -> None:
        """Have a deduplicator remember rows."""
        self._bridge.restore(state)

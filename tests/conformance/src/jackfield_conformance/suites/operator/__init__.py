"""Checks of operators.

The plugin's fixture may have, beside ``settings``:

* ``rows``: records that can be processed; the default are problems with answers and responses;
* ``bad``: records that cannot be processed, of which each must be set aside;
* ``kept``: for a filter, settings under which some of the rows are kept and others are not;
* ``context``: fields of an ``OperatorContext``, such as a ``generate`` function.

The check that needs ``bad`` does not apply without it.
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability

CAPABILITIES: dict[str, Capability] = {}

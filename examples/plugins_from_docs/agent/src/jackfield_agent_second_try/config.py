"""Settings of the agent."""

from __future__ import annotations

import attrs
from attrs.validators import ge

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """When the model is asked again, and how."""

    marker: str = option("####", help="what a finished answer contains")
    hint: str = option("Finish with #### and the number.", help="the user's message before the next try")
    tries: int = option(2, help="answers at most", validator=ge(1))

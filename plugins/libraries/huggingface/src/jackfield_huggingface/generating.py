"""The replicas of this process that generate now. An engine beside them may use their processors meanwhile."""

from __future__ import annotations

generating: set[object] = set()

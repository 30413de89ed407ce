"""Rewards from elsewhere: the plugins ``service`` and ``lagged``, and how to push rewards from Python."""

from __future__ import annotations

from jackfield_reward_service.pushing import Pending, Pushed, Reward, pending, push, push_all

__all__ = ["Pending", "Pushed", "Reward", "pending", "push", "push_all"]

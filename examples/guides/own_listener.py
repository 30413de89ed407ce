"""A class for `observe.hooks`: it notes how long each step took, and stops a run whose reward has collapsed."""

from jackfield.errors import RunError


class Watch:
    """Each public method is a hook. Names of helpers begin with an underscore."""

    def __init__(self):
        self._best = 0.0

    def run_started(self, event):
        print(f"{event.name}: {event.total_steps} steps")

    def step_ended(self, event):
        reward = event.metrics.get("reward/mean", 0.0)
        self._best = max(self._best, reward)
        if self._best > 0.5 and reward < 0.1:
            raise RunError("the reward has collapsed", where=f"step {event.step}", found=reward)

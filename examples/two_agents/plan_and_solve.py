"""Two agents, one model: a planner writes what to compute, a solver computes it. Both get the reward of the answer."""

from __future__ import annotations

from jackfield_agent_workflow import Task, Workflow


class PlanAndSolve(Workflow):
    """The planner sees the problem; the solver sees nothing but the plan."""

    async def run(self, task: Task) -> None:
        """Plan, solve, and reward both."""
        plan = await self.agent("planner").chat(task.messages)
        answer = await self.agent("solver").chat(plan.text)
        right = float(answer.text.strip() == task.ground_truth)
        self.reward(right, plan)
        self.reward(right, answer)

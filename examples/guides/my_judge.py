"""The same as a class: made once per worker process, with what is dear to make."""


class Judge:
    def __init__(self, forbidden):
        self.forbidden = set(forbidden)

    async def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return float(self.forbidden.isdisjoint(solution_str.split()))

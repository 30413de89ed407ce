"""A reward of one's own: the last number of the answer, and a little for being brief."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info, brevity=0.1):
    numbers = re.findall(r"-?\d+", solution_str)
    right = bool(numbers) and numbers[-1] == ground_truth.split()[-1]
    words = len(solution_str.split())
    return {"score": right + brevity / (1 + words), "correct": right, "words": words}

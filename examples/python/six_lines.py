"""GRPO from Python, on the quickstart's tiny model and problems."""

from jackfield import GRPO

MADE = "runs/quickstart/made"  # `make quickstart` creates it


def reward(completions: list, answer: list, **columns: list) -> list[float]:
    """TRL's signature: the completions of one task, and the columns of its record. GSM8K's answers end in `#### 7`."""
    right = [text.rpartition("#### ")[2] for text in answer]
    said = [messages[-1]["content"].rpartition("#### ")[2].strip() for messages in completions]
    return [float(one == other) for one, other in zip(said, right, strict=True)]


if __name__ == "__main__":
    small = {"data": {"groups_per_batch": 8, "rollouts_per_group": 4}, "sampling": {"max_new_tokens": 12}}
    training = GRPO(model=f"{MADE}/model", train=f"{MADE}/problems.jsonl", reward=reward, steps=4, **small)
    result = training.run()
    print(result.save("runs/trained"))

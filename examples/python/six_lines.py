"""GRPO from Python, on the quickstart's fine-tuned model and its problems."""

from jackfield import GRPO

QUICKSTART = "runs/quickstart"  # `make quickstart` creates it
SETTINGS = {"data.groups_per_batch": 8, "data.rollouts_per_group": 4, "optimizer.lr": 5e-4}


def reward(completions: list, answer: list, **columns: list) -> list[float]:
    """TRL's signature: the completions of one task, and the columns of its record. GSM8K's answers end in `#### 7`."""
    right = [text.rpartition("#### ")[2] for text in answer]
    said = [messages[-1]["content"].rpartition("#### ")[2].strip() for messages in completions]
    return [float(one == other) for one, other in zip(said, right, strict=True)]


if __name__ == "__main__":
    model, problems = f"{QUICKSTART}/warmup/model", f"{QUICKSTART}/made/problems.jsonl"
    training = GRPO(model=model, train=problems, reward=reward, steps=4, **SETTINGS, **{"sampling.max_new_tokens": 12})
    result = training.run()
    print(result.save("runs/trained"))

"""Load a trained model with vLLM, and ask it."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM may start processes
    model = LLM(model=sys.argv[1], max_model_len=64, enforce_eager=True)  # compiling would take longer than answering
    messages = [{"role": "user", "content": "Ben has 6 cups. Then Ben finds 1. How many cups now?"}]
    (answer,) = model.chat(messages, SamplingParams(temperature=0, max_tokens=12))
    print(answer.outputs[0].text)

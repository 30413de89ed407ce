"""The forms in which Hugging Face's libraries keep weights: checkpoint names, LoRA adapters, weight folders."""

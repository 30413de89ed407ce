"""Weights as safetensors in a folder, for explorers on other machines."""

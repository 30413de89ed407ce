"""Jackfield's training engine on Megatron-Core; the manifest ``plugin.toml`` beside this file names its parts."""

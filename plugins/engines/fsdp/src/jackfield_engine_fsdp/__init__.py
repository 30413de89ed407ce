"""Jackfield's training engine on PyTorch FSDP2; the manifest ``plugin.toml`` beside this file names its parts."""

"""Weights by broadcast: NCCL between GPUs, gloo between CPUs."""

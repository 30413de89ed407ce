"""Checks of rollout servers, on a Qwen3 of 36,128 parameters that the suite makes.

Fixture keys, all optional: ``settings``; ``log_prob_tolerance`` (default 1e-4); ``checkpoint_engine`` and
``checkpoint_engine_config`` (default ``in_process``): what reaches the server's workers from this process; ``openai``:
settings with which the server listens at an address (default ``{"openai": {}}``).
"""

from __future__ import annotations

from jackfield_conformance.registry import Capability

#: What a manifest may declare. Those of the first block are checked, when declared; those of the second are every
#: server's duty, and their checks always run; the last tell where and with what a server works.
CAPABILITIES = {
    "sleep": Capability(what="gives its memory back and takes it again, at both levels"),
    "openai": Capability(what="listens at an OpenAI-compatible address"),
    "stop_strings": Capability(what="ends a request where its text comes to hold a string"),
    "weights_adapter": Capability(what="loads LoRA adapters"),
    "weights_delta": Capability(what="loads differences of weights"),
    "multi_modal": Capability(what="takes images and other inputs beside tokens"),
    "stream": Capability(what="yields tokens as they come"),
    "abort": Capability(what="ends requests on demand"),
    "pause": Capability(what="stops decoding and goes on"),
    "seeds": Capability(what="draws the same tokens for the same seed"),
    "raw_log_probs": Capability(what="returns log-probabilities at temperature 1, without filters"),
    "weights_full": Capability(what="loads all weights"),
    "engine_log_probs": Capability(what="returns the engine's log-probabilities, in float32 within 1e-4"),
    "weights_float8": Capability(what="loads weights as float8_e4m3fn with a scale per tensor, or rounds them so"),
    "router_replay": Capability(what="returns the experts of each token of a mixture of experts"),
    "sliding_window": Capability(what="serves models with sliding-window attention beyond the window"),
    "cpu": Capability(what="runs on a CPU"),
    "cuda": Capability(what="runs on an NVIDIA GPU"),
}

"""For the suite of rollout servers: a tiny model, its weights, and its log-probabilities in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from safetensors.torch import save_file

from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield_conformance.registry import Subject
from jackfield_conformance.support.expecting import temporary_root

VOCABULARY = 64
ENGINE_TOLERANCE = 1e-4  #: of log-probabilities, in float32, where the manifest says they are the engine's
END = 1  #: the model's own end token
LIMIT = 512  #: of the model: prompt and response

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = [_LETTERS[n % 26] + _LETTERS[(n + 1 + n // 26) % 26] for n in range(VOCABULARY - 28)]

#: ``float8``: the weights as :func:`_quantise` makes them
Which = Literal["base", "other", "adapted", "base float8", "other float8"]
Weights = Mapping[str, torch.Tensor]

_RANK, _ALPHA = 4, 8.0
#: of :func:`adapter`, in PEFT's terms
PEFT_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}
_ADAPTED = tuple(f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj"))


def _new_model(seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # kernels of some backends have no smaller heads
        intermediate_size=48,
        max_position_embeddings=LIMIT,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def _tokenizer() -> Any:
    """Make a tokenizer of letters and some pairs of letters; text has no spaces, so only ids distinguish tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<end>", *_LETTERS, *_PAIRS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in _PAIRS], fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@functools.cache
def model_folder() -> str:
    """Write a Qwen3 model of 36,128 parameters with a tokenizer, in float32, once per process."""
    folder = str(temporary_root() / "rollout-model")
    config = _float32("base").config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    save_file(named_weights("base"), f"{folder}/model.safetensors", metadata={"format": "pt"})
    _tokenizer().save_pretrained(folder)
    return folder


def decode(token_ids: Sequence[int]) -> str:
    """Return the text of tokens."""
    texts = ["<pad>", "<end>", *_LETTERS, *_PAIRS]
    return "".join(texts[token] for token in token_ids)


@functools.cache
def _float32(which: Which) -> Any:
    return _new_model(1 if which == "other" else 0)


@functools.cache
def _float64(which: Which) -> Any:
    model = _new_model(1 if which.startswith("other") else 0).double()
    if which.endswith("float8"):
        _quantise(model)
    if which == "adapted":
        tensors = adapter()
        for name in _ADAPTED:
            down, up = (tensors[f"base_model.model.{name}.{factor}.weight"].double() for factor in ("lora_A", "lora_B"))
            model.get_submodule(name).weight += (_ALPHA / _RANK) * up @ down
    return model


def _quantise(model: Any) -> None:
    """Round linear layers except the output layer to float8_e4m3fn with a scale per tensor, the rest to bfloat16."""
    head = model.get_output_embeddings()
    linear = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head}
    for parameter in model.parameters():
        if id(parameter) in linear:
            scale = parameter.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            parameter.copy_((parameter / scale).to(torch.float8_e4m3fn).double() * scale)
        else:
            parameter.copy_(parameter.bfloat16())


def named_weights(which: Which = "other") -> dict[str, torch.Tensor]:
    """Return the weights as an engine exports them: Hugging Face names, tied tensors once."""
    return {name: parameter.detach().clone() for name, parameter in _float32(which).named_parameters()}


def adapted_weights() -> dict[str, torch.Tensor]:
    """Return the base model's weights with the adapter merged; two linear layers of each layer differ."""
    weights = named_weights("base")
    for name, parameter in _float64("adapted").named_parameters():
        if name.removesuffix(".weight") in _ADAPTED:
            weights[name] = parameter.detach().float()
    return weights


def adapter() -> dict[str, torch.Tensor]:
    """Return a LoRA adapter of the base model, under PEFT's names; see :data:`PEFT_CONFIG`."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name in _ADAPTED:
        rows, columns = _float32("base").get_submodule(name).weight.shape
        for factor, shape in (("lora_A", (_RANK, columns)), ("lora_B", (rows, _RANK))):
            tensors[f"base_model.model.{name}.{factor}.weight"] = torch.randn(shape, generator=generator) * 0.2
    return tensors


@functools.lru_cache(maxsize=4096)
def model_logits(which: Which, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return logits after each of ``tokens``, float64 ``[T, V]``, of a plain forward pass of the library."""
    with torch.no_grad():
        logits: torch.Tensor = _float64(which)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@functools.lru_cache(maxsize=256)
def _mixed_logits(old: Which, new: Which, tokens: tuple[int, ...], kept: int) -> torch.Tensor:
    """Return logits of the new weights, over the old weights' keys and values of the first ``kept`` tokens."""
    with torch.no_grad():
        first = _float64(old)(torch.tensor([tokens[:kept]]), use_cache=True)
        rest = _float64(new)(torch.tensor([tokens[kept:]]), past_key_values=first.past_key_values, use_cache=True)
    return torch.cat((first.logits[0], rest.logits[0]))


@functools.cache
def prompt_that_ends() -> tuple[int, ...]:
    """Find a prompt after which greedy decoding reaches the end token within a few tokens, but not at once."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(500):
        prompt = tuple(torch.randint(2, VOCABULARY, (5,), generator=generator).tolist())
        tokens: list[int] = []
        for _ in range(9):
            tokens.append(int(model_logits("base", (*prompt, *tokens))[-1].argmax()))
        if END in tokens[2:] and END not in tokens[:2]:
            return prompt
    raise AssertionError("no prompt of the tiny model ends")


def tolerance(subject: Subject) -> float:
    """Return how far log-probabilities may be off: fixture key ``log_prob_tolerance``, within what is declared."""
    allowed = float(subject.fixture.get("log_prob_tolerance", ENGINE_TOLERANCE))
    return min(allowed, ENGINE_TOLERANCE) if subject.capabilities.get("engine_log_probs") == "full" else allowed


def log_probs_of(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return log-probabilities ``[V]`` of the sampled distribution: temperature, top-k, top-p, min-p."""
    scaled = logits / sampling.temperature
    if sampling.top_k:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], -torch.inf)
    ordered, order = scaled.softmax(-1).sort(descending=True)
    before = ordered.cumsum(-1) - ordered  # the smallest set of at least top_p: what lies before a token is less
    dropped = (before >= sampling.top_p) & (sampling.top_p < 1)
    dropped |= ordered < sampling.min_p * ordered[0]
    dropped[0] = False
    return scaled.index_fill(0, order[dropped], -torch.inf).log_softmax(-1)


def _acceptable(logits: torch.Tensor, sampling: SamplingParams) -> Iterator[torch.Tensor]:
    """Yield the distributions that rounding at the edge of a filter may give, the exact one first."""
    if sampling.log_probs == "raw":
        yield logits.log_softmax(-1)
        return
    yield log_probs_of(logits, sampling)
    edges = (1 - 1e-5, 1 + 1e-5)
    for one in edges if sampling.top_p < 1 or sampling.min_p > 0 else ():
        for other in edges:
            top_p, min_p = min(sampling.top_p * one, 1.0), sampling.min_p * other
            yield log_probs_of(logits, attrs.evolve(sampling, top_p=top_p, min_p=min_p))


def assert_log_probs(
    subject: Subject,
    sent: GenerateRequest,
    result: GenerateResult,
    which: Which = "base",
    *,
    first: int = 0,
    old: Which | None = None,
) -> None:
    """Require that log-probabilities from token ``first`` on equal those of an independent float64 forward pass.

    With ``old``, the tokens before ``first`` come from an older model, whose keys and values may have been kept.
    """
    tokens = (*sent.prompt_ids, *result.token_ids)
    passes = [model_logits(which, tokens)]
    if old is not None:
        passes.append(_mixed_logits(old, which, tokens, len(sent.prompt_ids) + first - 1))
    worst = [_worst(sent, result, logits, first, tolerance(subject)) for logits in passes]
    assert None in worst, f"request {sent.request_id!r}: {worst[0]}"


def _worst(
    sent: GenerateRequest, result: GenerateResult, logits: torch.Tensor, first: int, allowed: float
) -> str | None:
    """Describe the first log-probability that is off by more than is allowed."""
    begin = len(sent.prompt_ids) - 1
    for place in range(first, len(result.token_ids)):
        token, found = result.token_ids[place], result.log_probs[place]
        expected = (float(each[token]) for each in _acceptable(logits[begin + place], sent.sampling))
        exact = next(expected)
        if abs(found - exact) > allowed and not any(abs(found - value) <= allowed for value in expected):
            return (
                f"token {place} (id {token}) has log-probability {found:.6f}, "
                f"an independent forward pass gives {exact:.6f}"
            )
    return None


def assert_quantised(sent: GenerateRequest, result: GenerateResult, which: Literal["base", "other"]) -> None:
    """Require that log-probabilities are, on average, at least twice as near to the float8 model as to the exact one.

    The server's other numerics are not judged.
    """
    tokens = (*sent.prompt_ids, *result.token_ids)
    chosen = torch.tensor(result.token_ids)[:, None]
    found = torch.tensor(result.log_probs, dtype=torch.float64)

    def distance(model: Which) -> float:
        logits = model_logits(model, tokens)[len(sent.prompt_ids) - 1 : -1]
        return float((logits.log_softmax(-1).gather(-1, chosen)[:, 0] - found).abs().mean())

    quantised, exact = distance("base float8" if which == "base" else "other float8"), distance(which)
    assert 2 * quantised <= exact, (
        f"request {sent.request_id!r}: log-probabilities are {quantised:.4f} from those of weights in float8_e4m3fn "
        f"with a scale per tensor, and {exact:.4f} from those of the weights that were sent"
    )


def assert_greedy(sent: GenerateRequest, result: GenerateResult, which: Which = "base", first: int = 0) -> None:
    """Require that each token is the most probable one, up to rounding."""
    logits = model_logits(which, (*sent.prompt_ids, *result.token_ids))
    for place in range(first, len(result.token_ids)):
        token, row = result.token_ids[place], logits[len(sent.prompt_ids) - 1 + place]
        assert row[token] >= row.max() - 1e-3, (
            f"request {sent.request_id!r}: greedy decoding drew {token} as token {place}, "
            f"the most probable one is {int(row.argmax())}"
        )

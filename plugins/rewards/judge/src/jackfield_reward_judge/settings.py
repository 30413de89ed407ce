"""Settings of the reward ``judge``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, le, min_len, optional

from jackfield.errors import ConfigError
from jackfield.sdk import option
from jackfield_reward_requests import check_template, names, secret_headers
from jackfield_reward_requests.service import RETRYABLE, statuses

MORE_FIELDS = ("conversation", "response_a", "response_b")  #: placeholders of rubrics beside those of requests
_HOST_SAMPLING = {"temperature": 0.0, "max_new_tokens": 1024}  #: of a model of the run
_SINGLE = frozenset({"solution_str", "model_text", "parts"})
_RESERVED = frozenset({"criteria", "explanation", "score", "scores", "winner"})
_CONNECTION = ("url", "api_key_env", "headers")


@attrs.frozen(kw_only=True)
class Criterion:
    """A criterion that gets a score of its own, which is a dimension of the reward."""

    name: str = option(help="Name of the criterion and of its dimension.", validator=min_len(1))
    description: str = option("", "What the judge looks at.")
    weight: float = option(1.0, "Weight in the score, the mean of the criteria.", gt(0.0))


@attrs.frozen(kw_only=True)
class RubricConfig:
    """What a judge is asked."""

    name: Literal["correctness", "helpfulness", "criteria"] | None = option(
        None,
        "Built-in rubric. correctness: against the ground truth; helpfulness: of the answer to its question; criteria: "
        "nothing but `criteria`. null: `text` or `file`, else criteria if there are some, else correctness.",
    )
    text: str | None = option(
        None, "Own rubric, with placeholders such as {conversation}, {solution_str}, {ground_truth}, {extra_info.name}."
    )
    file: str | None = option(None, "File of an own rubric.")
    criteria: tuple[Criterion, ...] = option((), "Criteria that are scored one by one.")
    scale: tuple[float, float] | None = option(
        None, "Lowest and highest score that a judge may give, which become 0 and 1; null: 0 to 10, correctness 0 to 1."
    )

    def __attrs_post_init__(self) -> None:
        given = [name for name in ("name", "text", "file") if getattr(self, name) is not None]
        if len(given) > 1:
            raise _refused(f"rubric.{given[-1]}", f"a rubric has {' and '.join(given)}", "give one of them")
        if self.name == "criteria" and not self.criteria:
            raise _refused("rubric.criteria", "the rubric `criteria` has no criteria", "give some")
        if self.scale is not None and not self.scale[0] < self.scale[1]:
            raise _refused(
                "rubric.scale", "the lowest score of a scale is not below the highest", "give [lowest, highest]"
            )
        if reserved := [each.name for each in self.criteria if each.name.lower() in _RESERVED]:
            raise _refused("rubric.criteria", f"a criterion has the name {reserved[0]}", "rename it")
        several = [each.name.lower() for each in self.criteria]
        if len(set(several)) < len(several):
            raise _refused("rubric.criteria", "two criteria have the same name", "rename one")
        if self.file is not None and not Path(self.file).is_file():
            raise _refused("rubric.file", f"there is no file {self.file}", "correct the path")
        check_template(self.own_text or "", "rubric", more=MORE_FIELDS)

    @property
    def own_text(self) -> str | None:
        """The text of a rubric that is not built in."""
        return self.text if self.file is None else Path(self.file).read_text(encoding="utf-8")

    @property
    def built_in(self) -> str:
        """The name of the built-in rubric."""
        return self.name or ("criteria" if self.criteria else "correctness")

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest score."""
        own = self.text is not None or self.file is not None or bool(self.criteria)
        return self.scale or ((0.0, 1.0) if not own and self.built_in == "correctness" else (0.0, 10.0))

    def check(self, pairwise: bool) -> None:
        """Refuse a rubric that does not show what is judged, and settings that pairs do not have."""
        text = self.own_text
        shown = names(text or "{solution_str}{response_a}{response_b}")
        if pairwise and not {"response_a", "response_b"} <= shown:
            raise _refused(
                "rubric", "a rubric for pairs does not show both responses", "use {response_a} and {response_b}"
            )
        if not pairwise and not _SINGLE & {name.partition(".")[0] for name in shown}:
            raise _refused("rubric", "a rubric does not show the response", "use {solution_str}")
        if not pairwise and text is not None and shown & {"response_a", "response_b"}:
            raise _refused("rubric", "a rubric for one response shows two", "set pairwise, or use {solution_str}")
        if pairwise and self.scale is not None:
            raise _refused("rubric.scale", "a scale has no effect with pairwise", "remove it")
        if pairwise and any(each.weight != 1.0 for each in self.criteria):
            raise _refused("rubric.criteria", "a criterion's weight has no effect with pairwise", "remove it")


@attrs.frozen(kw_only=True)
class JudgeConfig:
    """A judge of several. What it leaves out is as in the reward's settings."""

    model: str | None = option(None, "Name of the model.")
    url: str | None = option(None, "Address of its API; with another one, api_key_env and headers are not taken over.")
    api_key_env: str | None = option(None, "Environment variable with the key of the API.")
    headers: Mapping[str, str] | None = option(None, "Further headers.", secret_headers)
    sampling: Mapping[str, Any] | None = option(None, "Further fields of its requests.")
    structured: bool | None = option(None, "Whether the API is asked for structured outputs.")
    rubric: RubricConfig | None = option(None, "What it is asked.")


@attrs.frozen(kw_only=True)
class PairwiseConfig:
    """Comparison of the responses of a group with each other."""

    pairs: Literal["all", "ring", "sample"] = option(
        "all", "all: every pair; ring: each response with the `count` next ones; sample: `count` pairs by chance."
    )
    count: int | None = option(None, "Of ring and sample; null: 1 next one, or as many pairs as responses.", gt(0))
    minimum: float = option(
        0.5,
        "Least share of its comparisons that must have succeeded for a response to have a score.",
        [gt(0.0), le(1.0)],
    )

    def __attrs_post_init__(self) -> None:
        if self.pairs == "all" and self.count is not None:
            raise _refused("pairwise.count", "count has no effect with pairs all", "remove it")


@attrs.frozen(kw_only=True)
class JudgeRewardConfig:
    """Settings of judges and of how their verdicts become a score."""

    model: str = option(
        "policy", "Name of the model at `url`; without url, of a model of the run: `policy` is its own."
    )
    url: str | None = option(
        None, "Address of an OpenAI-compatible API, such as https://host/v1; null: a model that the run serves."
    )
    api_key_env: str | None = option(None, "Environment variable with the key of the API; null: it needs none.")
    headers: Mapping[str, str] = option(
        factory=dict, help="Further headers; ${NAME} in a value is an environment variable.", validator=secret_headers
    )
    sampling: Mapping[str, Any] = option(
        factory=dict,
        help="Further fields of requests, such as temperature and max_tokens; of a model of the run, its sampling "
        "parameters (default: temperature 0, max_new_tokens 1024).",
    )
    structured: bool = option(False, "Ask the API for structured outputs (`response_format` with a JSON schema).")
    rubric: RubricConfig = option(factory=RubricConfig, help="What a judge is asked.")
    judges: tuple[JudgeConfig, ...] = option((), "Several judges, each with its differences from these settings.")
    samples: int = option(1, "How often each judge is asked.", ge(1))
    combine: Literal["mean", "median", "minimum", "majority"] = option(
        "mean",
        "How several verdicts become a score; majority: 1 if most are at least `threshold`, 0 if fewer, else 0.5.",
    )
    threshold: float | None = option(None, "majority: least score of a good response; null: 0.5.", [gt(0.0), le(1.0)])
    quorum: int | None = option(None, "Verdicts that a score needs; null: all of them.", gt(0))
    pairwise: PairwiseConfig | None = option(
        None, "Compare the responses of a group in pairs, in both orders; null: score each response by itself."
    )
    repair: bool = option(True, "Ask once more for the form of an answer that cannot be read.")
    retryable: tuple[int | str, ...] = option(RETRYABLE, "Statuses after which a sample is scored again.", statuses)
    response_characters: int | None = option(
        50_000,
        "Longest part of a response that a judge is shown, its beginning and its end; null: all. A longer one than a "
        "judge can read would have no score, which a policy can learn to exploit.",
        optional(ge(100)),
    )
    request_seconds: float | None = option(
        None, "Longest time for one request; null: the deadline of the score.", gt(0.0)
    )
    check: bool = option(True, "Ask each API for its models before the first score, to detect a wrong address or key.")
    start_seconds: float = option(30.0, "How long that may take.", gt(0.0))

    def __attrs_post_init__(self) -> None:
        for judge in self.resolved:
            _check_judge(judge)
            judge.rubric.check(self.pairwise is not None)  # type: ignore[union-attr]
        unused = [name for name in _CONNECTION[1:] if getattr(self, name)]
        if unused and all(self._moved(judge) for judge in self.judges or (JudgeConfig(),)):
            raise _refused(unused[0], f"{unused[0]} has no effect: each judge has another url", "give it to the judges")
        if not self.check and self.start_seconds != 30.0:
            raise _refused("start_seconds", "start_seconds has no effect without check", "remove it")
        if self.threshold is not None and (self.combine != "majority" or self.pairwise is not None):
            raise _refused("threshold", "threshold is of combine majority, without pairwise", "remove it")
        if self.combine == "minimum" and self.pairwise is not None:
            raise _refused("combine", "a comparison has no minimum", "use mean, median or majority")
        if self.combine != "mean" and self.verdicts == 1:
            raise _refused(
                "combine", f"combine {self.combine} has no effect with one verdict", "give judges or samples"
            )
        if self.quorum is not None and self.quorum > self.verdicts:
            raise _refused("quorum", f"a quorum of {self.quorum} of {self.verdicts} verdicts", "lower it")

    @property
    def verdicts(self) -> int:
        """The number of verdicts on each response, or on each pair."""
        return len(self.resolved) * self.samples

    @property
    def resolved(self) -> list[JudgeConfig]:
        """The judges with all their settings."""
        return [self._resolve(judge) for judge in self.judges or (JudgeConfig(),)]

    def _moved(self, judge: JudgeConfig) -> bool:
        return judge.url is not None and judge.url != self.url  # a key is for one address

    def _resolve(self, judge: JudgeConfig) -> JudgeConfig:
        moved, given = self._moved(judge), {}
        for field in attrs.fields(JudgeConfig):
            own, kept = getattr(judge, field.name), not (moved and field.name in _CONNECTION)
            given[field.name] = own if own is not None or not kept else getattr(self, field.name)
        if given["url"] is None:
            given["sampling"] = {**_HOST_SAMPLING, **given["sampling"]}
        return JudgeConfig(**given)


def _check_judge(judge: JudgeConfig) -> None:
    """Refuse a judge without a model, and settings that it does not have."""
    if not judge.model:
        raise _refused("model", "a judge has no model", "name it: `policy` is the model of this run")
    if judge.url is None:
        unused = [name for name in ("api_key_env", "headers", "structured") if getattr(judge, name)]
        if unused:
            raise _refused(unused[0], f"{unused[0]} has no effect without url", "give the url of the judge's API")
    elif not judge.url.startswith(("http://", "https://")):
        raise _refused("url", f"{judge.url!r} is not an address", "give one such as https://host/v1")
    if reserved := {"model", "messages", "response_format", "stream", "n"} & set(judge.sampling or ()):
        raise _refused("sampling", f"sampling has {', '.join(sorted(reserved))}", "remove it: the judge sets it")


def _refused(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError(message, where=where, fix=fix)

"""Looks at all operators of Data-Juicer: ``python -m jackfield_operator_data_juicer.survey`` prints what it finds.

Each is made with its default settings, or those of :func:`settings_of`, and tried on the rows of ``examples``. What is
printed is the file ``operators.json``, from which settings are read and the documentation's table is made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jackfield.abc.operator import OperatorResult, Row
from jackfield.errors import ConfigError, OperatorError
from jackfield_operator_data_juicer.bridge import STATS
from jackfield_operator_data_juicer.bridges import bridge_of
from jackfield_operator_data_juicer.examples import rows
from jackfield_operator_data_juicer.making import kind_of, operator_class
from jackfield_operator_data_juicer.reading import thresholds

#: Columns of the examples, by the settings with which operators name them.
COLUMNS = {"text_key": "prompt", "query_key": "prompt", "prompt_key": "prompt", "response_key": "response"}
_LATEX, _DIRTY, _TOKENS = ({"text_key": name} for name in ("latex", "dirty", "tokens"))
#: Settings of operators that show nothing, or cannot be made, without any; ``{}`` in a text is the folder of files.
_SETTINGS: dict[str, dict[str, Any]] = {
    "agent_dialog_normalize_mapper": {"text_key": "text"},
    "audio_add_gaussian_noise_mapper": {"p": 1.0},
    "chinese_convert_mapper": _DIRTY,
    "clean_copyright_mapper": _DIRTY,
    "clean_html_mapper": _DIRTY,
    "clean_ip_mapper": _DIRTY,
    "document_line_deduplicator": {**_DIRTY, "frequency_threshold": 3},
    "expand_macro_mapper": _LATEX,
    "export_to_lerobot_mapper": {"output_dir": "{}/lerobot"},
    "fix_unicode_mapper": _DIRTY,
    "flagged_words_filter": {"flagged_words_dir": "{}/words"},
    "frequency_specified_field_selector": {"field_key": "source", "top_ratio": 0.5},
    "fused_sequential_batch_op": {"op_specs": [{"class_name": "clean_email_mapper", "kwargs": _DIRTY}]},
    "general_field_filter": {"filter_condition": "reward > 0.5"},
    "general_fused_op": {"fused_op_list": [{"clean_links_mapper": _DIRTY}]},
    "generate_qa_from_examples_mapper": {"seed_file": "{}/score.py"},
    "image_blur_mapper": {"p": 1.0},
    "image_ohem_selector": {"topk": 2, "score_file": "{}/score.py"},
    "latex_figure_context_extractor_mapper": _LATEX,
    "latex_merge_tex_mapper": {"compressed_file_key": "archive"},
    "llm_extract_mapper": {"input_keys": ["prompt"], "output_schema": {"number": "a number"}},
    "nlpaug_en_mapper": {"swap_random_word": True},
    "nlpcda_zh_mapper": {"text_key": "chinese", "replace_equivalent_num": True, "delete_random_char": True},
    "pii_redaction_mapper": _DIRTY,
    "punctuation_normalization_mapper": _DIRTY,
    "python_file_mapper": {"file_path": "{}/change.py"},
    "python_lambda_mapper": {"lambda_str": "lambda sample: {**sample, 'length': len(sample['prompt'])}"},
    "random_selector": {"select_num": 2},
    "range_specified_field_selector": {"field_key": "reward", "lower_percentile": 0.2, "upper_percentile": 0.8},
    "remove_bibliography_mapper": _LATEX,
    "remove_comments_mapper": _LATEX,
    "remove_header_mapper": _LATEX,
    "remove_repeat_sentences_mapper": _DIRTY,
    "remove_specific_chars_mapper": {**_DIRTY, "chars_to_remove": "◆●■"},
    "remove_table_text_mapper": _DIRTY,
    "replace_content_mapper": {"pattern": "[0-9]+", "repl": "N"},
    "specified_field_filter": {"field_key": "source", "target_value": ["a"]},
    "specified_numeric_field_filter": {"field_key": "reward", "min_value": 0.5},
    "stopwords_filter": {"stopwords_dir": "{}/words"},
    "suffix_filter": {"suffixes": [".txt"]},
    "tags_specified_field_selector": {"field_key": "source", "target_tags": ["a"]},
    "text_chunk_mapper": {"max_len": 20, "split_pattern": None},
    "topk_specified_field_selector": {"field_key": "reward", "topk": 2},
    "video_duration_filter": {"video_backend": "av"},
    "video_extract_frames_mapper": {"frame_dir": "{}/frames", "frame_field": "new_frames"},
    "video_hand_action_compute_mapper": {"tag_field_name": "new_actions"},
    "video_remove_watermark_mapper": {"roi_strings": ["0,0,0.2,0.2"]},
    "video_split_by_duration_mapper": {**_TOKENS, "video_backend": "av", "split_duration": 1},
    "video_split_by_key_frame_mapper": {**_TOKENS, "save_dir": "{}/parts"},
    "whitespace_normalization_mapper": _DIRTY,
}


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings with which an operator is tried, with files in a folder."""
    found: dict[str, Any] = json.loads(json.dumps(_SETTINGS.get(name, {})))
    return {key: value.replace("{}", str(folder)) if isinstance(value, str) else value for key, value in found.items()}


def main() -> None:
    """Print the facts about all operators, or those named, as JSON; the operators' own output goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    found = {"data_juicer": version("py-data-juicer"), "operators": dict(_facts(sys.argv[1:]))}
    out.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
    out.flush()
    sys.stderr.flush()
    os._exit(0)


def _facts(only: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from data_juicer.ops import OPERATORS

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # where operators make files that they are not told to make elsewhere
        for name in sorted(OPERATORS.modules):
            if only and name not in only:
                continue
            cls = operator_class(name)
            facts: dict[str, Any] = {"type": kind_of(cls).lower(), "thresholds": sorted(thresholds(cls))}
            refused, rest = tried(name, Path(folder))
            yield name, {**facts, "refused": refused, **rest}


def tried(name: str, folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return why an operator cannot be used, or None, with its type here and whether it shows what it does.

    The tests have the conformance suite's certificate for each that does.
    """
    try:
        bridge = bridge_of(name, settings_of(name, folder), COLUMNS, 0)
    except ConfigError as error:
        return None, {"as": None, "certified": False, "needs": str(error.found)}
    except OperatorError as error:
        return str(error.found), {}
    try:
        given = rows(folder)
        needs = why_not(given, bridge.process(given))
    except Exception as error:  # an operator over all rows may raise anything
        needs = f"{type(error).__name__}: {error}"
    return None, {"as": bridge.type, "certified": not needs, **({"needs": needs} if needs else {})}


def why_not(given: Sequence[Row], result: OperatorResult) -> str:
    """Return why a result does not show what an operator does, otherwise an empty text."""
    if result.set_aside:
        return next(iter(result.set_aside.values()))
    found = [{**values, **(values.get(STATS) or {})} for values in result.updates.values()]
    told = [
        value for values in found for name, value in values.items() if name != STATS and value not in ([], {}, None)
    ]
    return "" if told or result.removed or result.made else "it changes nothing"


if __name__ == "__main__":
    main()

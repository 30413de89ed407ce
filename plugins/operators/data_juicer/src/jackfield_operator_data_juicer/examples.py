"""Rows with texts, images, sounds, videos, LaTeX and traces of agents, on which operators are tried.

All of it is made here, the same each time: the files by Pillow, soundfile and PyAV.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from jackfield.abc.operator import Row

WIDTH, HEIGHT = 160, 120
_TEXTS = (
    "There were 7 cards. Dan buys 1. How many cards are there now?",
    "Ida has 9 toys and loses 2.  How many toys now? See https://example.org or ida@example.org.",
    "Sam sells 2 of 8 eggs, and then 3 more.\nHow many are left?",
    "There were 7 cards. Dan buys 1. How many cards are there now?",
)
#: What operators change that clean texts: each has something of its own.
_DIRTY = """<p>Caf&eacute; &amp; more</p>
/* Copyright 2020 by Ida. All rights reserved. */
\uff34\uff48\uff45 “quoted” text\uff1a\uff46\uff49\uff58 it\u3002 It is at 192.168.0.1.
See https://example.org/a and ida@example.org.
◆ A bullet ■ with\u3000wide space, and schÃ¶n text, 汉语.
toys cards
1 2
3 4
A pneumonoultramicroscopicsilicovolcanoconiosisandmorewordsthatgoonandon word, a a a a a a a a a, http www.
He is 9. He is 9. He is 9. He is 9. He is 9.
"""
_LATEX = r"""% a comment
\documentclass{article}
\newcommand{\name}{Jackfield}
\title{On fruits}
\begin{document}
\section{Introduction}
The text of \name. % another comment
As \ref{fig:a} shows, it grows.

\begin{figure}\includegraphics{a.png}\caption{The growth.}\label{fig:a}\end{figure}

\begin{figure}\includegraphics{b.png}\caption{The harvest.}\label{fig:b}\end{figure}

See \cref{fig:b} for the harvest.

\bibliography{references}
\end{document}
"""


def rows(folder: Path) -> tuple[Row, ...]:
    """Return four rows with all that operators read, whose files are in a folder; the first and the last are alike."""
    make_files(folder)
    return tuple(Row(key=f"row:{at}", values=_values(folder, at)) for at in range(len(_TEXTS)))


def _values(folder: Path, at: int) -> dict[str, Any]:
    like, text = at % 3, _TEXTS[at]
    frames = [str(folder / f"frame{number}.png") for number in range(12)]
    return {
        "prompt": text,
        "response": f"{text} It is {at}.",
        "reward": at / 4,
        "source": "abba"[at],
        "dirty": f"{text}\n{_DIRTY}",
        "chinese": f"今天有{at}个苹果\uff0c小明买了二十个苹果\uff0c现在有多少个苹果\uff1f",
        "latex": f"{_LATEX}% {text}",
        "tokens": f"<__dj__video> {text} <|__dj__eoc|>",
        "images": [str(folder / f"image{at}.png")],
        "audios": [str(folder / f"sound{at}.wav")],
        "videos": [str(folder / f"video{at}.mp4")],
        "archive": str(folder / f"archive{like}.zip"),
        "messages": _messages(text, like),
        "choices": [{"message": {"role": "assistant", "content": f"{like} cards"}, "usage": _usage(like)}],
        "usage": _usage(like),
        "video_frames": [frames[:8], frames[4:]],
        "clips": [str(folder / "video0.mp4"), str(folder / "video1.mp4")],
        "__dj__suffix__": (".txt", ".md", ".txt")[like],
        "__dj__meta__": _tags(like),
    }


def _messages(text: str, at: int) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": ("search", "add", "add")[at], "arguments": "{}"}}
    result = ("Error: no such card", "success: 7", '{"status": "ok"}')[at]
    return [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": f"{text} Write to ida@example.org, /home/ida/cards.txt."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
        {"role": "assistant", "content": f"There are {at}."},
    ]


def _usage(at: int) -> dict[str, int]:
    return {"prompt_tokens": 10 + at, "completion_tokens": 3, "total_tokens": 13 + at}


def _tags(at: int) -> dict[str, Any]:
    """Return the tags that operators on agents and on hands in videos read."""
    pose = np.tile(np.eye(4), (8, 1, 1))
    pose[:, 0, 3] = np.linspace(0, 0.1, 8)
    hand = {
        "frame_ids": [*range(8)],
        "transl": [[0.02 * frame, 0.01 * at, 0.5] for frame in range(8)],
        "global_orient": [[0.0, 0.0, 0.05 * frame] for frame in range(8)],
        "hand_pose": np.zeros((8, 15, 3)).tolist(),
        "joints_cam": [np.full((21, 3), (0.01 * frame, 0.0, 0.5)).tolist() for frame in range(8)],
    }
    return {
        "agent_tool_types": ["search", "add", "add"][: 2 + at % 2],
        "hand_reconstruction_hawor_tags": [{"right": hand, "left": {}, "fov_x": 1.0}] * 2,
        "video_camera_pose_tags": [{"cam_c2w": pose.tolist()}] * 2,
        "hand_action_tags": [{"right": _action(0, at)}, {"right": _action(1, at)}],
        "atomic_action_segments": [{**_action(0, at), "segment_id": 0, "start_frame": 0, "end_frame": 7}],
    }


def _action(clip: int, at: int) -> dict[str, Any]:
    steps = [0.0, 0.03, 0.05, 0.06, 0.061, 0.09, 0.3, 0.16]  # slow in the middle, and once out of line
    states = [[step + 0.06 * clip, 0.01 * at, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0] for step in steps]
    return {
        "hand_type": "right",
        "states": states,
        "actions": [[0.01] * 7 for _ in steps],
        "valid_frame_ids": [*range(8)],
        "joints_cam": [np.full((21, 3), (step, 0.0, 0.5)).tolist() for step in steps],
        "joints_world": [np.full((21, 3), (step, 0.0, 0.5)).tolist() for step in steps],
    }


def make_files(folder: Path) -> None:
    """Make the files of the rows, unless they are there."""
    if (folder / "video3.mp4").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        _picture(number / 12).save(folder / f"frame{number}.png")
    for at in range(len(_TEXTS)):
        like = at % 3
        _image(like).save(folder / f"image{at}.png")
        _sound(folder / f"sound{at}.wav", like)
        with zipfile.ZipFile(folder / f"archive{like}.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo("paper.tex"), _LATEX)
    (folder / "words").mkdir(exist_ok=True)
    for name, words in (("stopwords", ["the", "of", "is", "are", "and", "how"]), ("flagged_words", ["toys", "eggs"])):
        (folder / "words" / f"{name}.json").write_text(json.dumps({"en": words}), encoding="utf-8")
    (folder / "score.py").write_text(
        "def score_fn(model, samples, images, device):\n"
        "    return [sum(each[0].resize((1, 1)).getpixel((0, 0))) for each in images]\n",
        encoding="utf-8",
    )
    (folder / "change.py").write_text(
        'def process_single(sample):\n    return {**sample, "prompt": sample["prompt"].upper()}\n', encoding="utf-8"
    )
    for at in range(len(_TEXTS)):
        _video(folder / f"video{at}.mp4", at % 3)


def _image(at: int) -> Image.Image:
    """Return a face, a grid of four plots, or a wide gradient."""
    if at == 1:
        image = Image.new("RGB", (400, 300), "white")
        draw = ImageDraw.Draw(image)
        for x in (20, 190, 210, 380):
            draw.line((x, 10, x, 290), fill="black", width=2)
        for y in (10, 140, 160, 290):
            draw.line((20, y, 380, y), fill="black", width=2)
        return image
    return _picture(0.0) if at == 0 else Image.linear_gradient("L").resize((300, 100)).convert("RGB")


@functools.cache
def _picture(moved: float) -> Image.Image:
    """Return a drawn face, moved to the right by a part of 24 pixels."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (90, 110, 140))
    draw, x, y = ImageDraw.Draw(image), WIDTH // 2 + round(24 * moved) - 12, HEIGHT // 2
    skin, hair = (224, 188, 160), (60, 40, 30)
    draw.ellipse((x - 34, y - 44, x + 34, y + 46), fill=skin)
    draw.pieslice((x - 36, y - 50, x + 36, y + 10), 180, 360, fill=hair)
    draw.rectangle((x - 28, y - 22, x + 28, y - 12), fill=skin)
    for eye in (x - 14, x + 14):
        draw.rectangle((eye - 9, y - 14, eye + 9, y - 11), fill=hair)
        draw.ellipse((eye - 8, y - 8, eye + 8, y + 1), fill=(150, 115, 95))
        draw.ellipse((eye - 6, y - 7, eye + 6, y), fill="white")
        draw.ellipse((eye - 4, y - 7, eye + 4, y + 1), fill=(30, 20, 20))
    draw.polygon([(x, y - 4), (x - 6, y + 15), (x + 6, y + 15)], fill=(205, 165, 140))
    draw.ellipse((x - 14, y + 23, x + 14, y + 31), fill=(140, 60, 60))
    return image.filter(ImageFilter.GaussianBlur(1.2))


def _sound(file: Path, at: int) -> None:
    """Write a tone of a second, a shorter one, or noise."""
    import soundfile

    times = np.arange(8000 if at != 1 else 4000) / 8000
    noise = np.random.default_rng(at).normal(0, 0.05, len(times))
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * 440 * times) + noise if at < 2 else noise, 8000, subtype="PCM_16")


def _video(file: Path, at: int) -> None:
    """Write two seconds of a face that moves, a second in dark after the first, with a key frame for each half."""
    import av

    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base, stream.codec_context.gop_size, stream.codec_context.thread_count = Fraction(1, 10), 5, 1
        for number in range(20 - 4 * at):
            image = _picture(number / 20) if number < 10 else Image.eval(_picture(number / 20), _darker)
            for packet in stream.encode(av.VideoFrame.from_image(image)):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


_darker: Callable[[int], float] = lambda value: value / 3  # noqa: E731

"""Answers as events, while the model still generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from jackfield_agent_gateway.speech import Listener, Piece
from jackfield_openai.said import Answers, Head
from jackfield_openai.web import error_body, first_error, send_event

Events = Iterator[dict[str, Any]]


async def send(
    request: web.Request,
    listener: Listener,
    answering: asyncio.Task[Answers],
    more: Callable[[Head, Piece], Events],
    end: Callable[[Answers], Events],
    done: bytes = b"",
) -> web.StreamResponse:
    """Answer a request with the events of each piece as it comes, those of the end, and the bytes ``done``.

    An error before the first piece is raised, so that the status shows it; a later one is the last event.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    answering.add_done_callback(lambda _: listener.pieces.put_nowait(None))
    piece = await listener.pieces.get()
    if piece is None:
        await answering
    await response.prepare(request)
    while piece is not None:
        await _send(response, more(listener.head, piece))
        piece = await listener.pieces.get()
    try:
        answers = await answering
    except Exception as error:
        await send_event(response, error_body(first_error(error))[0])
    else:
        await _send(response, end(answers))
        await response.write(done)
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, events: Events) -> None:
    for event in events:
        await send_event(response, event, event.get("type"))

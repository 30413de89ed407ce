"""The HTTP client of rewards."""

from __future__ import annotations

import asyncio

from jackfield_reward_requests import AiohttpClient


def test_an_answer_that_comes_twice_is_not_the_next_one() -> None:
    """A service that repeats an answer after the first has arrived does not shift the answers of later requests."""

    async def main() -> list[str]:
        writers = list[asyncio.StreamWriter]()
        count = 0

        def answer() -> bytes:
            return b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % count

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal count
            writers.append(writer)
            while await reader.readline():
                await reader.readuntil(b"\r\n\r\n")
                count += 1
                writer.write(answer())

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        client = AiohttpClient()
        found = []
        for _ in range(3):
            found.append((await client.request("GET", url)).text)
            writers[-1].write(answer())
            await writers[-1].drain()
            for _ in range(10):  # the client reads it
                await asyncio.sleep(0)
        await client.close()
        for writer in writers:
            writer.close()
        server.close()
        return found

    assert ["1", "2", "3"] == asyncio.run(main())

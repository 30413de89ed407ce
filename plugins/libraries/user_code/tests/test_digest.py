"""The digest of a file is that of its module, and changes with what it imports from its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

from jackfield_user_code import UserCodePool, digest_file


def test_the_digest_is_that_of_the_imported_module(tmp_path: Path) -> None:
    file, helper = tmp_path / "code_with_helper.py", tmp_path / "helper_of_code.py"
    file.write_text("from helper_of_code import one\n\n\ndef call():\n    return one\n")
    helper.write_text("one = 1\n")

    async def of_module() -> str:
        pool = UserCodePool(f"{file}:call")
        try:
            await pool.start()
            return str(pool.about["digest"])
        finally:
            await pool.close()

    first = digest_file(file)
    assert asyncio.run(of_module()) == first
    helper.write_text("one = 2\n")
    assert first != digest_file(file)
    assert asyncio.run(of_module()) == digest_file(str(file))

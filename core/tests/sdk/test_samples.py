"""Names of samples."""

from __future__ import annotations

import asyncio

from jackfield.sdk.samples import naming_samples, sample_name


def test_names_reach_the_threads_of_a_block_and_end_with_it() -> None:
    """Rows without a name are numbered."""

    async def main() -> list[str]:
        with naming_samples(["sample a", "sample b"]):
            return await asyncio.to_thread(lambda: [sample_name(row) for row in range(3)])

    assert ["sample a", "sample b", "row 2"] == asyncio.run(main())
    assert "row 0" == sample_name(0)

"""Output that waits for a client, and when its texts pause."""

import asyncio

import pytest

from fastlstm.serve.text.engine import MAX_WAITING_CHARS, Channel
from fastlstm.serve.text.generation import OutputChunk, ScoredToken

SCORES = [ScoredToken(0, -1.0, [], 0)] * (MAX_WAITING_CHARS // 64)


@pytest.mark.parametrize(
    "chunk",
    [
        OutputChunk(0, "a" * MAX_WAITING_CHARS),
        OutputChunk(0, scores=SCORES),
        OutputChunk(0, prompt_scores=SCORES),
    ],
    ids=["text", "scores", "scores of the prompt"],
)
def test_a_slow_client_is_congested_until_it_reads(chunk):
    async def main():
        relieved = list[Channel]()
        channel = Channel(b"", relieved.append)
        channel.put(chunk)
        assert not channel.is_congested
        for _ in range(2):
            channel.put(OutputChunk(1, "b"))
            assert channel.is_congested
        assert [one.index for one in await channel.get()] == [0, 1]
        assert relieved == [channel]
        channel.is_congested = False
        channel.put(OutputChunk(0, "c"))
        await channel.get()
        assert len(relieved) == 1

    asyncio.run(main())

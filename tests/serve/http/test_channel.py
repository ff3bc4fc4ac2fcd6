"""What waits for a client: how much there may be before its texts wait, too."""

from __future__ import annotations

import asyncio

import pytest

from fastlstm.serve.http.channel import MAX_WAITING_CHARS, Channel
from fastlstm.serve.text.generation import OutputChunk, Scored

SCORES = [Scored(0, -1.0, [], 0)] * (MAX_WAITING_CHARS // 64)


@pytest.mark.parametrize(
    "piece",
    [
        OutputChunk(0, "a" * MAX_WAITING_CHARS),
        OutputChunk(0, scores=SCORES),
        OutputChunk(0, prompt_scores=SCORES),
    ],
    ids=["text", "scores", "scores of the prompt"],
)
def test_a_client_that_is_behind_is_congested_until_it_takes(piece: OutputChunk) -> None:
    async def main() -> None:
        channel, said = Channel(), list[str]()
        channel.on_congested = lambda: said.append("congested")
        channel.on_relieved = lambda: said.append("relieved")
        channel.put(piece)
        assert said == []
        for _ in range(2):
            channel.put(OutputChunk(1, "b"))
            assert said == ["congested"]
        assert [one.index for one in await channel.get()] == [0, 1]
        assert said == ["congested", "relieved"]

    asyncio.run(main())

"""Receiving bodies and sending chunks: turns of the event loop and measured times."""

import asyncio

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.transfer import Bodies, Sender
from fastlstm.serve.metrics import Metrics

SCOPE = {"headers": [(b"content-type", b"application/json")]}


def test_a_turn_of_the_event_loop_reads_a_few_parts_of_long_bodies():
    turn, taken = 0, dict[int, int]()

    def client(num_parts):
        left = num_parts

        async def receive():
            nonlocal left
            left -= 1
            taken[turn] = taken.get(turn, 0) + 1
            return {"type": "http.request", "body": b" " * 70_000, "more_body": left > 0}

        return receive

    async def main():
        nonlocal turn
        bodies = Bodies(1 << 20, 30)
        tasks = [asyncio.create_task(bodies.read(SCOPE, client(9))) for _ in range(40)]
        while not all(task.done() for task in tasks):
            turn += 1
            await asyncio.sleep(0)
        return [task.result() for task in tasks]

    assert asyncio.run(main()) == [b" " * 630_000] * 40
    first, *later = [taken[number] for number in sorted(taken)]
    assert first == 40  # what came along with the headers
    assert max(later) <= 4


def test_a_cancelled_body_releases_its_turn():
    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" " * 70_000, "more_body": True}

    async def main():
        bodies = Bodies(1 << 40, 30)
        left = [asyncio.create_task(bodies.read(SCOPE, receive)) for _ in range(40)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert bodies.turns.locked()
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert not bodies.turns.locked()

    asyncio.run(main())


def sender_of(send, metrics):
    scope = {"state": {"record": Record("one")}}
    return Sender(scope, None, send, lambda: None, metrics)  # type: ignore[arg-type]


def test_the_time_between_chunks_is_measured_between_chunks_only():
    metrics = Metrics()

    async def send(message):
        pass

    async def main():
        for _ in range(2):  # two answers, of four chunks and of one
            one = sender_of(send, metrics)
            await one.start(b"text/plain")
            for _ in range(3):
                await one.body(b"a")
            await one.body(b"", is_last=True)

    asyncio.run(main())
    value = metrics.registry.get_sample_value
    assert value("fastlstm_first_token_seconds_count") == 2
    assert value("fastlstm_inter_chunk_seconds_count") == 2 * 3
    assert (value("fastlstm_inter_chunk_seconds_sum") or 0.0) < 60

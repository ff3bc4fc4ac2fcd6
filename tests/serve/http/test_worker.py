"""The worker thread: order, cancelled calls, calls that never end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from fastlstm.serve.admission import Reservation
from fastlstm.serve.http.errors import Disconnected, Unavailable
from fastlstm.serve.http.worker import Worker


def run(check: Callable[[Worker], Awaitable[None]]) -> None:
    async def main() -> None:
        worker = Worker("worker-under-test")
        await check(worker)
        worker.stop()

    asyncio.run(main())


def test_calls_run_in_order_on_one_daemon_thread():
    seen: list[tuple[int, str, bool]] = []

    def note(number: int) -> int:
        thread = threading.current_thread()
        seen.append((number, thread.name, thread.daemon))
        return number

    async def check(worker: Worker) -> None:
        assert await asyncio.gather(*(worker.call(note, k) for k in range(5))) == list(range(5))
        assert seen == [(k, "worker-under-test", True) for k in range(5)]

    run(check)


def test_keys_take_turns():
    gate, made = threading.Event(), list[str]()

    async def check(worker: Worker) -> None:
        held = worker.call(gate.wait, 20, tenant=b"ann")
        while not worker.busy_s:
            await asyncio.sleep(0)
        calls = [
            worker.call(made.append, name + str(k), tenant=name.encode())
            for name, count in (("ann", 3), ("bob", 2), ("cat", 1))
            for k in range(count)
        ]
        gate.set()
        await asyncio.gather(held, *calls)
        assert made == ["bob0", "cat0", "ann0", "bob1", "ann1", "ann2"]

    run(check)


def test_a_busy_event_loop_runs_one_call_per_turn():
    async def check(worker: Worker) -> None:
        turn, made = 0, list[int]()
        calls = [worker.call(lambda: made.append(turn)) for _ in range(5)]
        while not all(call.done() for call in calls):
            time.sleep(0.02)  # time enough for all of them
            turn += 1
            await asyncio.sleep(0)
        assert len(made) == len(set(made)) == 5

    run(check)


def test_the_share_of_the_event_loop_starts_at_the_end_of_the_last_call():
    async def check(worker: Worker) -> None:
        worker._taken_s, worker._ended_s = 9.0, time.monotonic() - 2.0
        made: list[float] = []
        begin_s = time.monotonic()
        call = worker.call(lambda: made.append(time.monotonic()))
        while not call.done():
            time.sleep(0.01)  # a busy loop
            await asyncio.sleep(0)
        assert made[0] - begin_s < 1.0  # nine seconds would have been 36 of waiting

    run(check)


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("planted"), KeyboardInterrupt()])
def test_system_exits_do_not_end_the_thread(error):
    def fail() -> None:
        raise error

    async def check(worker: Worker) -> None:
        failing, later = worker.call(fail), worker.call(len, "ab")
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await asyncio.wait_for(failing, 20)
        assert await asyncio.wait_for(later, 20) == 2

    run(check)


def test_another_thread_may_stop_a_worker():
    gate = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)  # else asyncio does not look who calls it
        worker = Worker("worker-under-test")
        calls = [worker.call(gate.wait, 20), worker.call(len, "ab")]
        await asyncio.to_thread(worker.stop)
        for call in calls:
            with pytest.raises(Unavailable, match="shutting down"):
                await asyncio.wait_for(call, 20)
        gate.set()

    asyncio.run(main())


@pytest.mark.parametrize(("taken_s", "num_rests"), [(0.0, 0), (1.0, 1)])
def test_a_quiet_event_loop_rests_after_a_long_call(monkeypatch, taken_s, num_rests):
    async def check(worker: Worker) -> None:
        rests: list[float] = []
        later = worker._loop.call_later
        monkeypatch.setattr(
            worker._loop, "call_later", lambda s, f: (rests.append(s), later(s, f))[1]
        )
        worker._taken_s, worker._ended_s = taken_s, time.monotonic() + 0.1
        assert await worker.call(len, "abc") == 3
        assert len(rests) == num_rests

    run(check)


def test_a_disconnected_client_cancels_its_waiting_call():
    gate, made = threading.Event(), list[int]()

    async def check(worker: Worker) -> None:
        held = worker.call(gate.wait, 20)
        client = Reservation()
        waiting = asyncio.create_task(client.wait(worker.call(made.append, 1)))
        await asyncio.sleep(0)
        assert len(worker._waiting) >= 1
        client.leave()
        with pytest.raises(Disconnected):
            await waiting
        assert not [call for call in worker._waiting if call is not held]
        with pytest.raises(Disconnected):  # who has left waits for nothing more
            await client.wait(worker.call(made.append, 2))
        gate.set()
        await held
        await worker.call(made.append, 3)
        assert made == [3]

    run(check)

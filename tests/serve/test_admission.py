"""Admission: places, shares of API keys, refusals."""

import threading
from dataclasses import replace

import pytest

from fastlstm.serve.admission import Places, Reservation
from fastlstm.serve.http.errors import Overloaded, Unavailable
from running_server import SETTINGS, Idle


def filled(places, tenant):
    """How many places a key gets, one at a time."""
    count = 0
    while places.has_room(tenant, 1):
        places.take(tenant, 1)
        count += 1
    return count


def test_a_single_key_gets_all_places_and_several_share_them():
    assert filled(Places(12), b"") == 12
    places = Places(12, is_shared=True)
    assert [filled(places, tenant) for tenant in (b"a", b"b", b"c")] == [6, 3, 1]
    assert places.num_taken == 10
    places.release(b"a", 5)
    assert filled(places, b"c") == 3, "who held more than the others makes room"
    assert filled(Places(1, is_shared=True), b"a") == 1
    assert not places.is_full
    assert filled(Places(0, is_shared=True), b"a") == 0


def test_a_request_takes_at_most_half_of_what_is_shared():
    for total in (8, 9):
        places = Places(total, is_shared=True)
        assert places.has_room(b"a", 4)
        assert not places.has_room(b"a", 5)


def test_a_held_place_stays_whatever_others_take():
    places = Places(8, is_shared=True)
    assert filled(places, b"a") == 4
    assert filled(places, b"b") == 2
    assert not places.has_room(b"a", 1, held=1)
    assert places.has_room(b"a", 0, held=1)


def admission(num_places=4, limit=4, *, is_shared=False):
    settings = replace(SETTINGS, max_streams=num_places, max_queue=0)
    return Idle(id, settings, limit, is_shared=is_shared)


def admitted(to, count=1, tenant=b""):
    reservation = Reservation(tenant)
    to.reserve(reservation, count)
    return reservation


def test_places_are_reserved_up_to_a_number_and_released():
    places = admission()
    one, three = admitted(places), admitted(places, 3)
    assert places.num_held == 4
    with pytest.raises(Overloaded, match="the server is at its capacity") as caught:
        admitted(places)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (503, "1")
    places._give_back(three, 2)
    assert (three.num_places, places.num_held) == (1, 2)
    places.reserve(one, 3)
    assert (one.num_places, places.num_held) == (3, 4)
    with pytest.raises(Overloaded):
        places.reserve(one, 4)
    assert one.num_places == 3, "what was refused changes nothing"
    for reservation in (one, three):
        places.release(reservation)
        places.release(reservation)  # once more does nothing
    assert places.num_held == 0


def test_the_error_says_whether_the_key_or_the_server_is_full():
    places = admission(is_shared=True)
    for tenant in (b"ann", b"ann", b"bob"):
        admitted(places, tenant=tenant)
    with pytest.raises(Overloaded, match="this API key has all the places it may have now"):
        admitted(places, tenant=b"ann")
    admitted(places, tenant=b"cat")
    with pytest.raises(Overloaded, match="the server is at its capacity"):
        admitted(places, tenant=b"ann")


def test_a_cancelled_request_gets_no_more():
    places = admission()
    reservation = admitted(places)
    reservation.is_cancelled = True
    with pytest.raises(Unavailable, match="the client has left"):
        places.reserve(reservation, 2)
    assert places.num_held == 1


def test_threads_that_reserve_and_release_leave_nothing_behind():
    places = admission(1000)

    def churn():
        for _ in range(2000):
            places.release(admitted(places, 2))

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert places.num_held == 0

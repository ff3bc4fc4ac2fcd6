"""Places that clients hold, dealt out so that no API key takes them all."""

from __future__ import annotations

from collections import Counter


class Places:
    """A number of places; not for several threads.

    A key that holds places gets more only while at least as many stay free as it would then hold
    (the dynamic threshold of Choudhury and Hahne, 1998): alone it may have half of them, two keys a
    third each, and there is always one for a key that holds none.

    Args:
        total: places.
        is_shared: there are several keys; else a client may take every place.

    Attributes:
        total: as given.
        most: that one request can have.
        num_taken: places taken.
    """

    def __init__(self, total: int, *, is_shared: bool = False) -> None:
        self.total, self._is_shared = total, is_shared
        self.most = min(total, max(1, total // 2)) if is_shared else total
        self.num_taken = 0
        self._held: Counter[bytes] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether every place is taken."""
        return self.num_taken >= self.total

    def held(self, tenant: bytes) -> int:
        """Returns how many places a key holds."""
        return self._held[tenant]

    def has_room(self, tenant: bytes, count: int, held: int = 0) -> bool:
        """Whether a key may take so many places now, for a request that holds some already."""
        if count == 0:
            return True  # what it holds stays its own, whatever others have taken since
        num_free = self.total - self.num_taken - count
        if num_free < 0 or count + held > self.most:
            return False
        has_others = self._held[tenant] > held
        return not (self._is_shared and has_others) or self._held[tenant] + count <= num_free

    def is_sharing(self, tenant: bytes) -> bool:
        """Whether a key holds places of which others must have their share."""
        return self._is_shared and self._held[tenant] > 0

    def take(self, tenant: bytes, count: int) -> None:
        """Takes places; ask `has_room` before."""
        self._held[tenant] += count
        self.num_taken += count

    def give_back(self, tenant: bytes, count: int) -> None:
        """Gives places back."""
        self._held[tenant] -= count
        self.num_taken -= count
        assert self._held[tenant] >= 0

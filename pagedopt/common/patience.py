"""How long to wait before something is made that only repetition pays for."""

from __future__ import annotations


class Patience:
    """How many equal steps come before something is made for them.

    It doubles each time that what was made has served for few steps, and is 1 again once it has served for many.

    Attributes:
        wait: the number of steps.
        served: for how many steps what was made last has served.
    """

    def __init__(self, most: int) -> None:
        self.wait, self.served, self._most = 1, 0, most

    def lost(self) -> None:
        """Note that what was made can serve no longer."""
        self.wait = 1 if self.served > 4 * self.wait else min(2 * self.wait, self._most)
        self.served = 0

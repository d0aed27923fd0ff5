"""Decides whether a side without a message polls for one in the next turns of its loop before it sleeps."""

from __future__ import annotations

MAX_POLLS = 250  # of one wait; a turn of uvloop that does nothing else takes 1 to 2 us
MAX_SLEEPS = 63  # waits in a row that sleep at once, after polls in vain


class Polling:
    """A message that comes while its receiver polls needs no wake-up: that takes three system calls and the kernel's time to run a
    sleeping process, several times as long as handling the message. Polls in vain take the processor from others. So after each wait
    that outlasts its polls more of the next waits sleep at once: 1, 3, 7 and so on up to MAX_SLEEPS; a message found in time ends that.
    """

    def __init__(self) -> None:
        self._polls_left = 0  # of this wait
        self._num_sleeps = self._sleeps_left = 0

    def begin(self) -> bool:
        """A wait begins. False: sleep at once."""
        if self._sleeps_left:
            self._sleeps_left -= 1
            return False
        self._polls_left = MAX_POLLS
        return True

    def found(self) -> None:
        """A poll has found a message."""
        self._num_sleeps = 0

    def found_nothing(self) -> bool:
        """A poll was in vain. False: it was the last one, sleep."""
        self._polls_left -= 1
        if self._polls_left:
            return True
        self._num_sleeps = self._sleeps_left = min(2 * self._num_sleeps + 1, MAX_SLEEPS)
        return False

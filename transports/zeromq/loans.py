"""Lends memory to libzmq, so that large frames are sent without a copy.

pyzmq can lend memory too (`copy=False`), but it reports the return on a Python thread with a context of its own. For each frame, that
thread needs the interpreter lock, which costs more than copying a mebibyte, and it does not end with the last channel. Here, the end of a
loan is one word in memory, which libzmq's I/O thread writes (_loans.c) and which the next loan reads. libzmq is called through ctypes.
Without the C module, no memory is lent.
"""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any

import zmq

if TYPE_CHECKING:
    from flowrt.transports.native._words import Loan

_MESSAGE_BYTES = 64  # zmq_msg_t
_LOOK_AROUND = 16  # from this many loans on, the loans behind one that a stopped peer delays are checked too


class Lender:
    """The loans of one process. Create it only when `available()` is True."""

    def __init__(self) -> None:
        self._library, self._loan_type = _library()
        self._lent: deque[Loan] = deque()

    def send(self, pair: zmq.Socket[bytes], part: bytes | bytearray | memoryview, flags: int) -> None:
        """Sends as `pair.send(part, flags)` does, without a copy: keeps the memory until libzmq returns it. Raises zmq.ZMQError."""
        self.collect()
        loan = self._loan_type(part)
        message, library = ctypes.create_string_buffer(_MESSAGE_BYTES), self._library
        if library.zmq_msg_init_data(message, *loan.terms()) < 0:
            raise zmq.ZMQError(zmq.zmq_errno())
        self._lent.append(loan)
        while library.zmq_msg_send(message, pair.underlying, flags) < 0:
            number = zmq.zmq_errno()
            if number != errno.EINTR:  # a signal interrupted the call: retry, as pyzmq does
                library.zmq_msg_close(message)  # ends the loan
                raise zmq.Again(number) if number == errno.EAGAIN else zmq.ZMQError(number)

    def collect(self) -> None:
        """Frees returned loans."""
        lent = self._lent
        while lent and lent[0].returned:
            lent.popleft()
        if len(lent) >= _LOOK_AROUND and any(loan.returned for loan in lent):
            self._lent = deque(loan for loan in lent if not loan.returned)


@cache
def _library() -> tuple[Any, type[Loan]]:
    """Returns the libzmq of pyzmq with its argument types declared, and the Loan class. Raises when memory cannot be lent."""
    from zmq.backend.cython import _zmq

    from flowrt.transports.native._words import Loan

    library: Any = ctypes.CDLL(_zmq.__file__)
    library.zmq_msg_init_data.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    library.zmq_msg_send.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.zmq_msg_close.argtypes = [ctypes.c_void_p]
    return library, Loan


def available() -> bool:
    """Whether memory can be lent: this needs pyzmq's compiled backend and the C module."""
    try:
        _library()
    except (ImportError, OSError, AttributeError):
        return False
    return True

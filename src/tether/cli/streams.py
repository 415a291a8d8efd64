"""Standard output belongs to the result: whatever else is written to it goes to stderr."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """Send all that is written to standard output to stderr until the block ends.

    That holds for `print`, for the file descriptor itself and for processes that are started: a
    user's reward function may use any of them, and none may mix with a JSON document.
    """
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    try:
        _flush()
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """Empty the buffers above file descriptor 1: Python's, and that of compiled libraries."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            stream.flush()
    with contextlib.suppress(TypeError, OSError, AttributeError):  # no C library under this name
        ctypes.CDLL(None).fflush(None)

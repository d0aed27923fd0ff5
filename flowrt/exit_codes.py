"""Exit codes of the commands that run a graph. 3, a worker died, belongs to its error (flowrt/errors.py)."""

SUCCESS, FAILURE, BAD_INPUT, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

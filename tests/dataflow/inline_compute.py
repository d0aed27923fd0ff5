"""A compute seam of tests that runs each call at once, in the loop."""

from __future__ import annotations


class InlineCompute:
    running = None
    slowness = 1.0

    def is_short(self, label):
        return True

    def run_inline(self, label, call):
        return call()

    async def run(self, label, call, bound_seconds=60.0):
        return call()

    async def aclose(self):
        pass

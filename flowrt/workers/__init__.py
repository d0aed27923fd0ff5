"""Composition of one worker process: operators, runner, links and, in an attention worker, the engine."""

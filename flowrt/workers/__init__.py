"""workers: the wiring of one process: its operators, its runner, its links and, in an attention worker, its engine."""

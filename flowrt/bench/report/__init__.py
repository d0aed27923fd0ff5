"""What a benchmark publishes: figures with intervals and verdicts, tables, JSON and plots."""

"""The programs that flowrt is measured against, and the processes that a benchmark starts."""

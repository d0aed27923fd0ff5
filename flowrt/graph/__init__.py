"""Graph files: reading, checking, expanding and fusing them. Pure: starts no process and loads no torch."""

"""`python -m flowrt`: the same as the command `flowrt` (cli.py)."""

from flowrt.cli import main

main()

"""`python -m flowrt`: the same as the command `flowrt` (cli.py)."""

from flowrt.cli.app import main

main()

"""`python -m flowrt`: runs the same command line as `flowrt` (flowrt/cli/app.py)."""

from flowrt.cli.app import main

main()

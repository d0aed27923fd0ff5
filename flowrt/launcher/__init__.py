"""The launcher: starts a graph's workers, supervises them and ends them."""

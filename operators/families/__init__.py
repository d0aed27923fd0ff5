"""One file per model family: what its config.json means and where its weights lie. Imports nothing, and no file here imports torch."""

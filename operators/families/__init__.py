"""One file per model family: the meaning of its config.json and the names of its weights. Imports nothing; no file here imports torch."""

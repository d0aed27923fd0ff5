"""Text input and output: the tokenizer of a model. Imports neither torch nor channels."""

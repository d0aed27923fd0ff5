"""Load on a server that speaks OpenAI's API: what `flowrt bench serve` sends and measures."""

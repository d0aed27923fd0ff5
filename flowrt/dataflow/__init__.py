"""Data flow of one worker: matches inputs by tag, fires nodes, and sends their outputs, for model graphs and users' graphs alike."""

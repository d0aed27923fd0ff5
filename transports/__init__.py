"""transports: how a message gets there. Buffers, never torch; imports nothing of flowrt or operators."""

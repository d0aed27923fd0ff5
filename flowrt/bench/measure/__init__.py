"""How a benchmark measures: alternating pairs, decoding runs, memory, and the limits of the machine."""

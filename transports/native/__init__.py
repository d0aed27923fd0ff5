"""C modules of the transports: atomics, records, copy threads and memory loans."""

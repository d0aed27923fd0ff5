"""The `shm` transport: rings in memory that two processes of one host share."""

"""The `zmq` transport: ZeroMQ sockets between two processes."""

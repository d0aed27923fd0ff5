"""The gateway: request log, admission, routing and completion; the commit point of every token."""

"""Mailboxes, links between processes, and control messages. Only this package opens channels of the data path."""

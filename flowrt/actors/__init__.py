"""actors: mailboxes, links between processes, control messages. The only room that opens channels of the data path."""

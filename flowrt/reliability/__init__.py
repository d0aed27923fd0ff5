"""reliability: who is alive, who holds what, what to do when somebody dies. Pure: events in, decisions out."""

"""engine: what one group does next, as pure decisions. Events come in, decisions go out; no clock, no task, no torch."""

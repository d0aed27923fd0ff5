"""Parts that several transports share: send queues, rendezvous, flow control, windows and copies."""

"""Parts that several transports share: send queues, rendezvous, flow control and copies."""

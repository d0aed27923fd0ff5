"""What a step costs: models of times, their fit to measurements, the equations of the ping-pong pipeline. Pure."""

"""planning: which deployment for which hardware and targets. Pure. So far the equations of the ping-pong pipeline."""

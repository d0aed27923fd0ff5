"""cluster: starting and ending the processes of a run, and the gateway. Workers are started by module name; none is imported."""

"""What a run gets from the machines below it: processes and hosts as interfaces; clocks, limits, signals, files."""

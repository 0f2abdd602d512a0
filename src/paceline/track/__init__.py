"""Where records go: the run log, the console, the loss curve."""

"""What joins passes, search, report and runtime for `autopar.api` and the commands."""

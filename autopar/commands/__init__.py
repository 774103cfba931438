"""What each command does; the heavy imports happen here, not in `autopar.cli`."""

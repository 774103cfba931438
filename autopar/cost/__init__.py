"""What things cost: ops on a device, collectives on the links of a cluster."""

"""What to run on each machine: one coordinator, as many volunteers as there are. Topologies to act out are here too."""

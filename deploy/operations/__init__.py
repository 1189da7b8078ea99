"""Questions to a running cluster, and changes of it: what commands do, and the simulator too."""

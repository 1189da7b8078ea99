"""Tools of developers: training of the demo model, and the wheels that `make gpu-check` needs."""

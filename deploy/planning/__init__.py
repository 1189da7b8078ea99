"""Plans a cluster: plays recorded traces on simulated workers with the step times of a real one."""

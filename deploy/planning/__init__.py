"""What a cluster is planned from: recorded traces, and the step times of a worker."""

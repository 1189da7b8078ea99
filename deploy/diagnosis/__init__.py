"""Says why a cluster is slow, for `tandem doctor` (docs/tasks/slow.md). Pure, but for reading this host and clocks."""

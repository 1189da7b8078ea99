"""Says why a cluster is slow, for `tandem doctor` (docs/tasks/slow.md). Pure, except for reading this host and clocks."""

"""Says why a cluster is slow: `tandem doctor`. Pure, except for `deploy.diagnosis.local_host`. See docs/slow.md."""

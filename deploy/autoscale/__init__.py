"""Plans the number of workers of each role. Pure, except for `deploy.autoscale.autoscaler`. See docs/autoscaling.md."""

"""How many workers of each role there should be. Pure: `deploy.autoscale.autoscaler` feeds it and acts.
docs/autoscaling.md."""

"""How many workers of each role there should be. Pure: `deploy.autoscaler` feeds it and acts. docs/autoscaling.md."""

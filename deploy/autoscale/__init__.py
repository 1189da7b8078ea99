"""How many prefill and decode workers there should be. Pure; `deploy.autoscaler` feeds it and acts. docs/autoscaling.md."""

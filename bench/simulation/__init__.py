"""Router and planner in simulated time, with synthetic or recorded traffic."""

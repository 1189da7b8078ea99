"""What Tandem tells of itself: log lines and metrics. Imports nothing else of Tandem."""

"""Trains the built-in demo model and makes its training data, its tokeniser and its exam."""

"""What is this deployment? Schema, strict loading with a path in every error, and `explain`."""

"""Where deferred jobs are kept."""

"""Open-loop HTTP load: requests go out at their times, whatever the answers do."""

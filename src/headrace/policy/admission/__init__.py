"""May it enter? Four gates over frozen evidence."""

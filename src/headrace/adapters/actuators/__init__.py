"""What provides replica groups: processes of this machine."""

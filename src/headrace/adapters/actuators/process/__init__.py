"""Replica groups as processes of this machine, which never outlive us."""

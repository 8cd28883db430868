"""A small right configuration for tests to break."""

BASE = """\
deployment:
  models:
    - name: m
  pools:
    - name: p
      model: m
      profile: h100-8b-tp1
  tenants:
    - name: t
"""

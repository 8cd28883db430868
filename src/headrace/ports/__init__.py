"""Protocols of everything impure: what drivers need of clocks, engines and stores."""

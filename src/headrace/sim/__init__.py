"""The simulated driver: the production plane over emulated replicas in virtual time.

Knows the true output lengths, which the plane never sees. Nothing of the product is implemented
here: no policy, no accounting, no engine.
"""

"""The emulated replica as a process of its own: vLLM's HTTP surface over the emulated engine.

For whoever must talk to an engine over the network: adapters, breakers, autoscalers, demos. What
the engine computes, and when, is `EmulatedEngine`'s; here is only how it looks from outside, and
what goes wrong on the way when it is told to.
"""

"""Pure deciders, one folder a question: evidence in, decision out.

A policy is its frozen configuration plus methods. It sees no true output length, reads no clock and
draws no random number.
"""

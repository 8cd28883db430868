"""The machine: events in, effects out, time passed in.

`core` is the whole surface: `handle`, `handle_timer`, `next_timer`, `freeze`, `thaw`. It opens no
socket, reads no clock and draws no number that did not come in an event, so the gateway and the
simulator drive the same object. All state is plain data in `state`.
"""

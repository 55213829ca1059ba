"""Decides. No I/O, no clock, no randomness, no logging: every function takes facts and the time and returns a value.

Reading order: ``events`` (all that can be remembered), ``action`` and ``attempt`` (what a caller asked for and its one
sending), ``binding`` and ``stream`` (a run and what was seen of it), ``approval``, ``reconciler`` (the one next step).
Below them ``provider`` says what each answer of Hermes proves, ``requests`` what is sent, ``contracts`` what is
published, ``errors`` which codes exist. ``ports`` names what the driver needs from the world.
"""

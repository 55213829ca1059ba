"""Touches the world: database, network, clock, files, processes.

Begin with ``host`` (what is wired to what), then ``driver`` (load, decide, commit the claim, perform, record), then
``intake`` (how work enters), ``store`` over ``journal`` (how events are kept), ``hermes`` (how a provider is called),
``views`` (how answers are kept) and ``http`` (how questions are answered). No rule about a run or an Action is here.
"""

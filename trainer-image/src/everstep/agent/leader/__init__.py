"""The leader of a job: `leader_state` decides, as a pure state machine; `leader_server` carries it out.

Here belongs what only agent 0 runs; the other pods never load it. No process of a rank is touched here.
"""

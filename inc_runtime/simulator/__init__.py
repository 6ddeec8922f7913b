"""The simulator: the role programs on a virtual clock, for networks and world sizes that nobody can run yet.

Every result is `source: simulated` and names the calibration that it used.
"""

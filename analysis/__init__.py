"""Tables, claims and figures of the papers, and findings. Pure functions of files: no torch, no
account, no network.
"""

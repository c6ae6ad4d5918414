"""Codecs that `commsweep export` writes: each, with `packing.py` at its end, needs torch alone.

Constants in capitals at the top are settings; the export puts the user's values there.
"""

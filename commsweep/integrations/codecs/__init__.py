"""Codecs that `commsweep export` writes: each file needs torch alone and imports nothing of ours.

Constants in capitals at the top are settings; the export puts the user's values there.
"""

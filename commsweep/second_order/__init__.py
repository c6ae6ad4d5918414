"""Distributed K-FAC (SPD-KFAC, arXiv 2107.06533): where factors are inverted, and how their
messages are fused.
"""

"""Sparse training: phases, masks, sparse attention, and every FLOP of it counted."""

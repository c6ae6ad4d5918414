"""Compiled forms of what compressors do: `cpu.py` and `packing.py` by numba, `gpu.py` by Triton.

Each is called from one function of a compressor, and the plain torch code that it must equal bit
for bit stands below the call. That code runs where a compiled form does not serve.
"""

"""Presets: named runs. `config` and `store` import without torch; everything else may need
it.
"""

"""What one run is and does. `config` and `store` import without torch; everything else may need
it.
"""

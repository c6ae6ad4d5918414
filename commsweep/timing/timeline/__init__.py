"""When activities happen that need resources and wait for each other; pipelines in it. No torch, no
store.
"""

"""commsweep: how far can the messages of distributed training be squeezed before training
breaks?
"""

"""Samples as tensors on the device: images, texts, where their files lie and what they are."""

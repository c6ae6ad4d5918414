"""Samples as tensors on the device; every sample carries its index."""

from experiments.data.images import Images, load
from experiments.data.module import Batches, ImageData

__all__ = ["Batches", "ImageData", "Images", "load"]

"""Images: kept once, written into messages, prepared for models."""

from torchrl_mt.vision.images import StoredImage
from torchrl_mt.vision.processor import VisionProcessor
from torchrl_mt.vision.rows import RowImages, compact_images

__all__ = ["RowImages", "StoredImage", "VisionProcessor", "compact_images"]

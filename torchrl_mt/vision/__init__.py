"""Images: kept once, written into messages, prepared for models."""

from torchrl_mt.vision.images import StoredImage, is_image
from torchrl_mt.vision.messages import (
    for_template,
    image_source,
    images_of,
    is_image_part,
    refuse_videos,
    with_data_uris,
    with_stored_images,
)
from torchrl_mt.vision.model import VisionModel
from torchrl_mt.vision.positions import rope_positions
from torchrl_mt.vision.processor import ImageInputs, VisionProcessor
from torchrl_mt.vision.rows import RowImages, compact_images

__all__ = [
    "ImageInputs",
    "RowImages",
    "StoredImage",
    "VisionModel",
    "VisionProcessor",
    "compact_images",
    "for_template",
    "image_source",
    "images_of",
    "is_image",
    "is_image_part",
    "refuse_videos",
    "rope_positions",
    "with_data_uris",
    "with_stored_images",
]

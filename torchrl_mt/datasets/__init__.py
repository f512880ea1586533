"""Episodes on disk, conversations as training rows, and checkpoints of whole runs."""

from torchrl_mt.datasets._files.readers import DatasetError
from torchrl_mt.datasets.clip_dataset import ClipDataset
from torchrl_mt.datasets.conversations.conversation_dataset import ConversationDataset
from torchrl_mt.datasets.conversations.hugging_face import to_hf_dataset
from torchrl_mt.datasets.dataset import EpisodeDataset
from torchrl_mt.datasets.registry import register_format
from torchrl_mt.datasets.runs.run_checkpoint import RunCheckpoint
from torchrl_mt.datasets.runs.trained_weights import TrainedWeights
from torchrl_mt.datasets.transfer import load_episodes, save_episodes
from torchrl_mt.datasets.writing import episode_writer, open_episodes

__all__ = [
    "ClipDataset",
    "ConversationDataset",
    "DatasetError",
    "EpisodeDataset",
    "RunCheckpoint",
    "TrainedWeights",
    "episode_writer",
    "load_episodes",
    "open_episodes",
    "register_format",
    "save_episodes",
    "to_hf_dataset",
]

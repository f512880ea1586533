"""What formats of data sets are made of, for those that other packages add."""

from torchrl_mt.data._store.steps import Column, Path, Steps, name_of
from torchrl_mt.datasets._encoding.arrow_columns import ArrowColumns
from torchrl_mt.datasets._encoding.schema import EpisodeSchema, Field
from torchrl_mt.datasets._encoding.stored_columns import (
    DenseRows,
    RaggedRows,
    StoredRows,
    TextRows,
    array_dtype,
    decode,
)
from torchrl_mt.datasets._encoding.values import dtype_of, to_json_text
from torchrl_mt.datasets._files.entry_files import EntryFiles, errors_named, with_suffix
from torchrl_mt.datasets._files.episode_folder import (
    EpisodeFolder,
    EpisodeList,
    checked_header,
    format_in,
)
from torchrl_mt.datasets._files.episode_log import LoggedWriter, has_log, read_log
from torchrl_mt.datasets._files.hdf5_rows import own_node
from torchrl_mt.datasets._files.image_files import channels_of, from_picture, is_image, to_picture
from torchrl_mt.datasets._files.readers import EpisodicReader, FormatReader, Runs, runs_of
from torchrl_mt.datasets._files.writers import EncodedEpisode
from torchrl_mt.datasets.formats.folder import FolderReader, FolderWriter
from torchrl_mt.datasets.registry import Format, Mode

__all__ = [
    "ArrowColumns",
    "Column",
    "DenseRows",
    "EncodedEpisode",
    "EntryFiles",
    "EpisodeFolder",
    "EpisodeList",
    "EpisodeSchema",
    "EpisodicReader",
    "Field",
    "FolderReader",
    "FolderWriter",
    "Format",
    "FormatReader",
    "LoggedWriter",
    "Mode",
    "Path",
    "RaggedRows",
    "Runs",
    "Steps",
    "StoredRows",
    "TextRows",
    "array_dtype",
    "channels_of",
    "checked_header",
    "decode",
    "dtype_of",
    "errors_named",
    "format_in",
    "from_picture",
    "has_log",
    "is_image",
    "name_of",
    "own_node",
    "read_log",
    "runs_of",
    "to_json_text",
    "to_picture",
    "with_suffix",
]

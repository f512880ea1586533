"""``python -m torchrl_mt info``: what is installed, and what extras lack."""

from __future__ import annotations

import importlib.metadata

import pytest

import torchrl_mt.installed
from torchrl_mt.__main__ import main
from torchrl_mt.installed import missing_packages, versions


def test_info_shows_versions_devices_and_extras(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"torch         {versions()['torch']}" in shown
    assert "CPU" in shown
    for extra in importlib.metadata.metadata("torchrl-mt").get_all("Provides-Extra"):
        assert f"\n  {extra}" in shown


def test_what_is_missing_or_too_old_is_told(capsys, monkeypatch):
    found = importlib.metadata.version

    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return "7.0" if name == "matplotlib" else "0.1" if name == "httpx" else found(name)

    monkeypatch.setattr(torchrl_mt.installed, "version", version)
    missing = missing_packages()
    assert missing["lora"] == ["peft>=0.17"]
    assert missing["examples"] == ["httpx>=0.27", "peft>=0.17"]  # of the extras that it names
    main(["info"])
    assert "lacks peft>=0.17: pip install 'torchrl-mt[lora]'" in capsys.readouterr().out


def test_without_an_installation_there_are_no_extras(capsys, monkeypatch):
    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torchrl_mt.installed, "distribution", distribution)
    assert missing_packages() == {}
    assert main(["info"]) == 0
    assert "is not installed" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["infos"])
    assert "invalid choice" in capsys.readouterr().err

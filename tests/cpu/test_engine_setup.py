"""How an engine is put together, where that is more than wiring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd import engine_setup
from inferd.core.messages import Setup
from pagepool.errors import PagepoolError


@pytest.mark.parametrize("changes", [False, True])
def test_weights_that_change_while_they_are_read_are_not_served_under_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"old weights")

    def load_model(*_: Any, **__: Any) -> str:
        if changes:
            (folder / "model.safetensors").write_bytes(b"new weights")
        return "a model"

    monkeypatch.setattr(engine_setup, "load_model", load_model)
    setup = Setup(str(folder), "unix:/nowhere")
    if changes:
        with pytest.raises(PagepoolError, match="changed while they were read; start again"):
            engine_setup.load(setup, folder, cache, print)
    else:
        assert engine_setup.load(setup, folder, cache, print) == ("a model", engine_setup.digest(folder, cache))

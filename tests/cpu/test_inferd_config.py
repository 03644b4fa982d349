"""inferd's settings: what is derived from the machine, what is refused, and what its engine's environment says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferd.config import engine_environment, load_config
from inferd.engine_setup import limits_on
from inferd.front import main, setup
from pagepool.errors import PagepoolError


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PAGEPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_without_flags_both_daemons_meet_in_the_runtime_directory(tmp_path: Path) -> None:
    config = load_config([]).config
    assert config.memd == f"unix:{tmp_path}/pagepool/memd.sock"
    assert [str(listener) for listener in config.listen] == [f"unix:{tmp_path}/pagepool/inferd.sock"]
    assert (config.model, config.cache_dir) == ("smollm2", tmp_path / "cache" / "pagepool")
    assert config.name == f"inferd-{os.getpid()}"


def test_the_engine_is_told_what_inferd_was_told(tmp_path: Path) -> None:
    flags = "--model /m --memd unix:/run/x/memd.sock --name w --dtype bfloat16 --threads 3 --max-batch-tokens 7"
    more = f"--max-num-seqs 5 --max-queue 4 --no-warmup --cache-dir {tmp_path} --log-level debug --log-format json"
    gpu = "--device cuda:1 --compile off --graphs off"
    guesses = ["--speculate-tokens", "6", "--prefix-wait", "1500ms"]
    told = setup(load_config([*flags.split(), *more.split(), *gpu.split(), *guesses]).config)
    assert (told.speculate_tokens, told.prefix_wait_s) == (6, 1.5)
    assert (told.device, told.compile, told.graphs) == ("cuda:1", False, False)
    assert (told.model, told.memd, told.name, told.dtype) == ("/m", "unix:/run/x/memd.sock", "w", "bfloat16")
    assert (told.threads, told.max_batch_tokens, told.max_num_seqs, told.max_queue) == (3, 7, 5, 4)
    assert (told.warmup, told.cache_dir, told.log_level, told.log_format) == (False, str(tmp_path), "debug", "json")


def test_what_depends_on_the_device_is_left_to_the_engine() -> None:
    told = setup(load_config([]).config)
    assert (told.device, told.compile, told.graphs) == ("auto", True, True)
    assert (told.max_batch_tokens, told.max_num_seqs) == (0, 0)


def test_prefixes_are_reused_unless_that_is_turned_off() -> None:
    assert setup(load_config([]).config).chunked_prefix is True
    assert setup(load_config(["--no-enable-chunked-prefix"]).config).chunked_prefix is False
    assert limits_on("cpu", setup(load_config(["--no-enable-chunked-prefix"]).config)).chunked_prefix is False


def test_a_request_need_not_wait_for_a_prefix() -> None:
    assert setup(load_config([]).config).prefix_wait_s == 10.0
    assert setup(load_config(["--prefix-wait", "0"]).config).prefix_wait_s == 0.0


def test_nothing_is_guessed_unless_asked_for() -> None:
    assert setup(load_config([]).config).speculate_tokens == 0
    assert setup(load_config(["--speculate-tokens", "32"]).config).speculate_tokens == 32


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--memd", "tcp:127.0.0.1:7070"], "Unix socket"),
        (["--memd", "nonsense"], "unix:PATH"),
        (["--prefix-wait", "-1"], "0, or a time such as 10s"),
        (["--listen", "tcp:0.0.0.0:7071"], "loopback"),
        (["--dtype", "int8"], "bfloat16"),
        (["--threads", "0"], "at least 1"),
        (["--name", "x" * 129], "128 bytes"),
        (["--spin", "maybe"], "auto"),
        (["--max-batch-tokens", "-1"], "at least 1"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--speculate-tokens", "33"], "from 0, which is off, to 32"),
        (["--speculate-tokens", "-1"], "from 0, which is off, to 32"),
        (["--device", "gpu"], "cuda"),
        (["--device", "cuda:x"], "cuda"),
        (["--compile", "maybe"], "one of on, off"),
        (["--graphs", "yes"], "one of on, off"),
    ],
)
def test_what_cannot_be_is_refused_by_flag_and_limit(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PagepoolError, match=word) as caught:
        load_config(flags)
    assert flags[0] in caught.value.message
    assert main(flags) == 2
    assert caught.value.message in capsys.readouterr().err


def test_check_prints_the_settings_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--max-num-seqs", "9"]) == 0
    assert "--max-num-seqs" in capsys.readouterr().out


def test_the_operator_chooses_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    policies = [
        engine_environment(load_config(flags.split()).config).get("OMP_WAIT_POLICY")
        for flags in ("", "--spin on", "--spin off")
    ]
    assert policies == [None, "ACTIVE", "PASSIVE"]


def test_the_engines_threads_are_set_before_its_first_import() -> None:
    environment = engine_environment(load_config(["--threads", "3"]).config)
    assert {environment[name] for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")} == {"3"}
    assert environment["PATH"] == os.environ["PATH"]


def test_what_torch_compiles_is_kept_with_the_other_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    config = load_config(["--cache-dir", str(tmp_path)]).config
    assert engine_environment(config)["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert engine_environment(config)["TORCHINDUCTOR_CACHE_DIR"] == "/mine"

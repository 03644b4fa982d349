"""One precedence, and errors that name where the wrong value stands."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from memd.config import MemdConfig
from pagepool.errors import PagepoolError, Reason
from pagepool.listen import TcpListener, UnixListener, default_socket, parse_listener
from pagepool.settings import load, parse_bool, parse_positive, parse_seconds, parse_size, setting

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@dataclass(frozen=True)
class Example:
    size: int = setting("a size", parse_size, default=1)
    name: str = setting("a name", default="none")
    tags: tuple[str, ...] = setting("tags", default=(), repeatable=True)
    warm: bool = setting("whether", parse_bool, default=False)


@dataclass(frozen=True)
class Needy:
    model: str = setting("a model")


def refused(*argv: str, schema: type = Example, **environ: str) -> PagepoolError:
    with pytest.raises(PagepoolError) as caught:
        load(schema, "app", argv, environ)
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('size = "1KiB"\nname = "file"\ntags = ["a", "b"]\n')
    environ = {"PAGEPOOL_APP_NAME": "environment", "PAGEPOOL_APP_SIZE": "2KiB", "PAGEPOOL_OTHER_X": "1", "HOME": "/"}
    loaded = load(Example, "app", ["--config", str(file), "--size", "3KiB"], environ)
    assert loaded.config == Example(size=3072, name="environment", tags=("a", "b"))
    assert loaded.origins == {
        "size": "--size",
        "name": "PAGEPOOL_APP_NAME",
        "tags": f"{file}: tags",
        "warm": "default",
    }


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text("size = 77\nwarm = true\n")
    assert load(Example, "app", [], {"PAGEPOOL_APP_CONFIG": str(file)}).config == Example(size=77, warm=True)


def test_repeatable_settings_replace_those_of_lower_rank() -> None:
    environ = {"PAGEPOOL_APP_TAGS": "a, b"}
    assert load(Example, "app", [], environ).config.tags == ("a", "b")
    assert load(Example, "app", ["--tags", "c", "--tags", "d"], environ).config.tags == ("c", "d")


def test_a_switch_has_an_opposite() -> None:
    environ = {"PAGEPOOL_APP_WARM": "yes"}
    assert load(Example, "app", [], environ).config.warm
    assert not load(Example, "app", ["--no-warm"], environ).config.warm


def test_check_shows_each_value_with_its_origin() -> None:
    loaded = load(Example, "app", ["--check", "--size", "2MiB"], {"PAGEPOOL_APP_TAGS": "x,y"})
    assert loaded.check
    lines = [line.split() for line in loaded.describe().splitlines()]
    assert lines[0] == ["size", "2097152", "(--size)"]
    assert ["tags", "x,", "y", "(PAGEPOOL_APP_TAGS)"] in lines
    assert lines[-1] == ["warm", "False", "(default)"]


def test_unknown_keys_and_variables_are_named(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text("sise = 1\n")
    assert "'sise'" in refused("--config", str(file)).message
    assert refused(PAGEPOOL_APP_SISE="1").field == "PAGEPOOL_APP_SISE"


def test_wrong_values_name_their_origin_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text('size = "large"\n')
    assert refused("--config", str(file)).field == f"{file}: size"
    assert refused("--size", "-1").field == "--size"
    assert refused(PAGEPOOL_APP_SIZE="1.5").message == (
        "PAGEPOOL_APP_SIZE is '1.5', but must be a positive whole number of bytes; correct it or leave it out"
    )
    file.write_text("size = [1]\n")
    assert "a single value" in refused("--config", str(file)).message


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "app.toml"
    file.write_text("size = = 1")
    assert str(file) in refused("--config", str(file)).message
    assert "none.toml" in refused("--config", str(tmp_path / "none.toml")).message


def test_a_missing_setting_without_default_is_asked_for() -> None:
    assert refused(schema=Needy).field == "--model"


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2GB", 2 * 10**9), ("8B", 8), ("1 GiB", 1 << 30)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1Gi", "1e30GiB", "nan", "infGiB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        parse_size(text)


def test_times_and_counts_are_checked() -> None:
    assert [parse_seconds(text) for text in ("10", "2.5s", "500ms")] == [10, 2.5, 0.5]
    assert parse_positive("12") == 12
    for parse, text in [(parse_seconds, "-1"), (parse_seconds, "nan"), (parse_positive, "0"), (parse_positive, "x")]:
        with pytest.raises(ValueError, match="a "):
            parse(text)


def test_listeners_are_unix_or_loopback() -> None:
    assert parse_listener("unix:/run/x.sock") == UnixListener(Path("/run/x.sock"))
    assert parse_listener("tcp:127.0.0.1:7070") == TcpListener("127.0.0.1", 7070)
    assert str(parse_listener("tcp:[::1]:0")) == "tcp:[::1]:0"
    for text in ("tcp:0.0.0.0:1", "tcp:example.org:1", "tcp:[::]:1"):
        with pytest.raises(PagepoolError, match="loopback"):
            parse_listener(text)
    for text in ("", "unix:", "tcp:127.0.0.1", "tcp::1", "tcp:127.0.0.1:99999", "http://x"):
        with pytest.raises(PagepoolError, match="unix:PATH or tcp:HOST:PORT"):
            parse_listener(text)
    with pytest.raises(PagepoolError, match="at most 107 bytes, and this one has 204"):
        parse_listener("unix:/" + "x" * 203)


def test_the_default_socket_is_in_the_users_own_runtime_directory() -> None:
    assert default_socket("memd", {"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == Path("/run/user/7/pagepool/memd.sock")
    assert default_socket("memd", {}, 0) == Path("/run/pagepool/memd.sock")
    assert default_socket("inferd", {}, 1000) == Path("/tmp/pagepool-1000/inferd.sock")


@pytest.mark.parametrize("block_size", ["0", "7", "12", "256", "-16", "16.0"])
def test_memd_refuses_block_sizes_that_are_no_power_of_two_from_8_to_128(block_size: str) -> None:
    with pytest.raises(PagepoolError, match=r"--block-size is .* a power of two from 8 to 128"):
        load(MemdConfig, "memd", ["--block-size", block_size], {})


def unit_files() -> list[Path]:
    return sorted(DEPLOY.glob("*.service"))


def test_units_start_the_daemons_with_flags_that_exist() -> None:
    known = {"--" + name.replace("_", "-") for name in MemdConfig.__dataclass_fields__} | {"--config", "--check"}
    commands = {}
    for path in unit_files():
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[method-assign,assignment]
        unit.read(path)
        commands[path.name] = unit["Service"]["ExecStart"].split()
        assert unit["Service"]["NoNewPrivileges"] == "yes"
        assert unit["Service"]["ProtectSystem"] == "strict"
        assert unit["Service"]["Type"] == "notify"
        # memd may come and go: its workers wait for it, and are told to stop by their own front.
        assert not {"BindsTo", "Requires", "PartOf"} & set(unit["Unit"])
        assert unit["Service"].get("KillMode", "mixed") == "mixed"
    assert commands.keys() == {"memd.service", "inferd@.service"}
    flags = {word.partition("=")[0] for word in commands["memd.service"] if word.startswith("--")}
    assert flags <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for path in unit_files():
        # The command need not be installed here for the rest to be looked at.
        text = path.read_text().replace("/usr/bin/memd", "/bin/true").replace("/usr/bin/inferd", "/bin/true")
        (tmp_path / path.name.replace("@", "@one")).write_text(text)
    files = [str(path) for path in tmp_path.glob("*.service")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if any(Path(name).name in line for name in files)]
    assert not complaints

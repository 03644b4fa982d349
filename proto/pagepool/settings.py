"""Settings of a daemon: defaults < TOML file < environment < flags, from one frozen dataclass.

A field declared with `setting` is, for program "memd" and field `pool_bytes`: the flag `--pool-bytes`, the environment
variable `PAGEPOOL_MEMD_POOL_BYTES` (several values of a repeatable one separated by commas) and the TOML key
`pool_bytes`. The file is `--config`, else `PAGEPOOL_MEMD_CONFIG`, else /etc/pagepool/memd.toml if it is there. A name
that no field has is an error, wherever it stands.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from pagepool.errors import PagepoolError, Reason, invalid_field

DEFAULT = "default"

T = TypeVar("T")


def setting(
    help_text: str,
    parse: Callable[[str], Any] = str,
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    repeatable: bool = False,
) -> Any:
    """A field of a settings dataclass. `parse` makes the value from text, raising ValueError or PagepoolError.

    A repeatable field holds a tuple of such values.
    """
    metadata = {"help": help_text, "parse": parse, "repeatable": repeatable}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A daemon's settings, where each came from, and whether only a check was asked for."""

    config: T
    origins: Mapping[str, str]
    check: bool

    def describe(self) -> str:
        """One line per setting: its name, its value and its origin."""
        rows = [(name, _shown(getattr(self.config, name)), origin) for name, origin in self.origins.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  ({origin})" for name, value, origin in rows)


def load(schema: type[T], program: str, argv: Sequence[str], environ: Mapping[str, str]) -> Loaded[T]:
    """The settings of a program. Raises INVALID_FIELD naming flag, variable or file and key, the value and the way out.

    Prints help or a usage error and raises SystemExit as argparse does.
    """
    options = {option.name: option for option in fields(schema)}  # type: ignore[arg-type]
    flags = vars(_parser(program, options).parse_args(argv))
    check, config = flags.pop("check", False), flags.pop("config", None)
    variables = _variables(program, options, environ)
    path = config or variables.pop("config", None) or _default_file(program)
    sources = [
        *_from_file(Path(path) if path else None, options),
        *((name, _words(options[name], text), _variable(program, name)) for name, text in variables.items()),
        *((name, value, _flag(name)) for name, value in flags.items()),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(options, DEFAULT)
    for name, raw, origin in sources:
        values[name] = _parsed(options[name], raw, origin)
        origins[name] = origin
    for name, option in options.items():
        if name not in values and option.default is MISSING and option.default_factory is MISSING:
            raise invalid_field(_flag(name), "not given", "given", f"give it, or set {_variable(program, name)}")
    return Loaded(schema(**values), origins, check)


def parse_size(text: str) -> int:
    """Bytes from `4096`, `512MiB`, `1.5GiB` or `2GB`. Raises ValueError."""
    number = text.rstrip("kKMGTiB")
    unit = text[len(number) :]
    factor = _SIZE_UNITS.get(unit)
    if factor is None:
        raise ValueError(f"a size such as 512MiB or 2GiB (units: {', '.join(filter(None, _SIZE_UNITS))})")
    try:
        size = float(number) * factor
    except ValueError:
        raise ValueError("a size such as 512MiB or 2GiB") from None
    if not 0 < size < 1 << 62 or size != int(size):
        raise ValueError("a positive whole number of bytes")
    return int(size)


def parse_positive(text: str) -> int:
    """A whole number above 0. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError("a whole number, at least 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """Seconds from `10`, `2.5`, `10s` or `500ms`; above 0. Raises ValueError."""
    number, factor = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise ValueError("a time such as 10s or 500ms, above 0")
    return seconds


def parse_bool(text: str) -> bool:
    """True or False from `true`, `yes`, `on`, `1` and their opposites. Raises ValueError."""
    try:
        return {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }[text.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def choice(*words: str) -> Callable[[str], str]:
    """A parser that takes one of the words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


def parse_device(text: str) -> str:
    """A device: `auto`, `cpu`, `cuda`, or `cuda:N` by CUDA's numbers. Raises ValueError."""
    number = text.removeprefix("cuda:")
    if text not in {"auto", "cpu", "cuda"} and not (number != text and number.isascii() and number.isdigit()):
        raise ValueError("auto, cpu, cuda, or cuda:N with a GPU's number")
    return text


_SIZE_UNITS = {
    "": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(program: str, name: str) -> str:
    return f"PAGEPOOL_{program}_{name}".upper()


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "auto" if value is None else str(value)


def _parser(program: str, options: Mapping[str, Field[Any]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file (default: {_file_name(program)} if it is there)")
    parser.add_argument("--check", action="store_true", help="print the settings in force and where they came from")
    for name, option in options.items():
        text = option.metadata["help"].replace("%", "%%")
        if option.metadata["parse"] is parse_bool:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            action = "append" if option.metadata["repeatable"] else "store"
            parser.add_argument(_flag(name), action=action, metavar=name.upper().rpartition("_")[2], help=text)
    return parser


def _file_name(program: str) -> Path:
    return Path("/etc/pagepool") / f"{program}.toml"


def _default_file(program: str) -> Path | None:
    path = _file_name(program)
    return path if path.exists() else None


def _variables(program: str, options: Mapping[str, Field[Any]], environ: Mapping[str, str]) -> dict[str, str]:
    """The program's own variables by field name; "config" may be among them."""
    prefix, known = _variable(program, ""), {_variable(program, name): name for name in [*options, "config"]}
    found = {name: text for name, text in environ.items() if name.startswith(prefix)}
    for name, text in found.items():
        if name not in known:
            limit = f"the name of a setting ({', '.join(known)})"
            raise invalid_field(name, f"set to {text!r}", limit, "unset it or correct its name")
    return {known[name]: text for name, text in found.items()}


def _from_file(path: Path | None, options: Mapping[str, Field[Any]]) -> list[tuple[str, Any, str]]:
    if path is None:
        return []
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise invalid_field(
            "--config", path, f"a readable TOML file ({error})", "correct it or name another"
        ) from error
    for key in table:
        if key not in options:
            limit = f"among the known keys ({', '.join(options)})"
            raise invalid_field(f"{path}", f"the key {key!r}", limit, "remove it or correct its name")
    return [(key, value, f"{path}: {key}") for key, value in table.items()]


def _words(option: Field[Any], text: str) -> Any:
    return [part.strip() for part in text.split(",")] if option.metadata["repeatable"] else text


def _parsed(option: Field[Any], raw: Any, origin: str) -> Any:
    if option.metadata["repeatable"]:
        return tuple(_one(option, item, origin) for item in (raw if isinstance(raw, list) else [raw]))
    return _one(option, raw, origin)


def _one(option: Field[Any], raw: Any, origin: str) -> Any:
    parse = option.metadata["parse"]
    if isinstance(raw, (dict, list)):
        raise invalid_field(origin, raw, "a single value", "write it without brackets")
    try:
        return parse(raw if isinstance(raw, str) else str(raw))
    except ValueError as error:
        raise invalid_field(origin, repr(raw), str(error), "correct it or leave it out") from error
    except PagepoolError as error:
        raise PagepoolError(Reason.INVALID_FIELD, f"{origin}: {error.message}", field=origin, value=raw) from error

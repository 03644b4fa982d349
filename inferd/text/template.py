"""A model's chat template, rendered as transformers renders it, without transformers.

transformers imports torch for this, 500 MB and seconds that the front does not need; tests hold the two together.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagepool.errors import PagepoolError, Reason

Message = Mapping[str, str]
"""`role` and `content`."""


class ChatTemplate:
    """A compiled template. `variables` are what it may name beside the messages: `bos_token` and its like.

    The constructor raises jinja2.TemplateError if the source is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        tree = environment.parse(source)
        parts = [node.data for node in tree.find_all(nodes.TemplateData)]
        parts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literal_text = "\0".join(parts)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, up to where the model's answer starts. Raises CHAT_TEMPLATE_REFUSED with the template's words."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            why = str(error) or type(error).__name__
            message = f"the model's chat template refuses these messages: {why}; mend them, or send text"
            raise PagepoolError(
                Reason.CHAT_TEMPLATE_REFUSED, message, field="chat.messages", template_message=why
            ) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` for templates, without a way to other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As dict.fromkeys."""
        return dict.fromkeys(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 templates may give it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)

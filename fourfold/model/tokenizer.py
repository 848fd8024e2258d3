"""Renders chat templates and converts between text and token ids, without torch.

Every service computes `tokenizer_sha256` of its own model folder, and the coordinator refuses a service with another
hash, because token ids have no meaning under another tokenizer. The hash needs no library. Everything else needs the
extra `fourfold[tokenizer]`: `tokenizers` reads tokenizer.json, Jinja renders the template.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from fourfold import hub
from fourfold.errors import ConfigError, InvalidInput
from fourfold.model import runs
from fourfold.model.folder import BUILTIN_PREFIX, TEMPLATE_FILE, read_template, resolve

if TYPE_CHECKING:
    import jinja2
    import tokenizers

    from fourfold.arrays import Int32Array
    from fourfold.model.token_bytes import TokenBytes

_NAME: Final = "4F6rName"
_KEY: Final = "4F6rKey"


class CallForm(NamedTuple):
    """How a template reads a message with tool calls.

    Most templates read the arguments of a call as an object, and its message has a text. Those of DeepSeek join the
    JSON text of the arguments to other text, and the first ones write the calls of a message only if its content is
    null.
    """

    json_text: bool = False
    """The arguments are JSON text."""
    null_content: bool = False
    """A message without a text has null as its content. Such a template leaves out the calls beside a text."""

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Convert messages whose tool calls have objects as arguments to this form."""
        return [self._fit(message) for message in messages] if any(self) else messages

    def _fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = []
        for call in message.get("tool_calls") or ():
            function = dict(call["function"])
            if self.json_text and not isinstance(function.get("arguments"), str):
                function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
            calls.append({**call, "function": function})
        if not calls:
            return message
        content = message.get("content") or (None if self.null_content else "")
        return {**message, "tool_calls": calls, "content": content}


def find_call_form(render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallForm:
    """Return the first form in which a template writes the name and the arguments of a call; the usual one if none.

    Args:
        render: returns the text of messages; None if the template refuses them.
    """
    for json_text, null_content in product((False, True), repeat=2):
        function = {"name": _NAME, "arguments": json.dumps({_KEY: 1}) if json_text else {_KEY: 1}}
        call = {"type": "function", "id": "call00001", "function": function}  # Mistral's have 9 characters
        reply = {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}
        text = render([{"role": "user", "content": "x"}, reply]) or ""
        # Neither the form of Python, nor JSON text in a JSON text.
        if _NAME in text and _KEY in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text:
            return CallForm(json_text, null_content)
    return CallForm()


Message = Mapping[str, Any]  # one chat message: at least "role" and "content"

MARK: Final = "\udcff"
"""Stands after the first character of each look-alike in escaped text. No valid text has it: it is half a character."""

_DEFAULT_TEMPLATE: Final = "default"
_TOOL_TEMPLATE: Final = "tool_use"  # name of the template for conversations with tools, if a model has several
# What {% generation %} and {% endgeneration %} write where these variables of the template are set. Elsewhere they are
# undefined, and Jinja writes nothing for an undefined variable. Like MARK, these halves of a character are no text.
_MARKS: Final = {"_fourfold_begin": "\udcfd", "_fourfold_end": "\udcfe"}
_BEGIN, _END = _MARKS.values()


def tokenizer_sha256(folder: Path) -> bytes:
    """Return the 32-byte hash of tokenizer.json and of the chat templates in a model folder.

    Raises:
        ConfigError: the folder has no tokenizer.json.
    """
    templates = {_DEFAULT_TEMPLATE: "", **_used_templates(folder)}
    parts = (_bytes(folder / "tokenizer.json"), *(text.encode() for text in templates.values()))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def check_same_vocabulary(folder: Path, other: Path, *, key: str) -> None:
    """Check that each token of the model in `folder` has the same id in `other`, which the recipe's `key` names.

    Raises:
        ConfigError: names the token with the lowest id that has another one; or a tokenizer.json cannot be read.
    """
    one, two = (Tokenizer.load(path)._tokenizer.get_vocab(with_added_tokens=True) for path in (folder, other))
    wrong = sorted((number, text) for text, number in one.items() if two.get(text) != number)
    if wrong:
        number, text = wrong[0]
        found = f"id {two[text]}" if text in two else "no such token"
        raise ConfigError(
            f"{key} = {str(other)!r} has another vocabulary than model.source: {len(wrong):,} of {len(one):,} tokens "
            f"differ, such as {text!r} with id {number} (there: {found}); use a model with the same tokenizer"
        )


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a model folder for conversations without tools; None if there is none."""
    return _used_templates(folder).get(_DEFAULT_TEMPLATE)


def check_template(path: str) -> None:
    """Raise ConfigError if a recipe's `data.chat_template` is no file with a Jinja template."""
    _compile(read_template(path), f"data.chat_template = {path!r}", "", {})


def _used_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a model folder for conversations without and with tools, as far as it has them.

    They are chat_template.jinja and the files of `hub.ADDITIONAL_TEMPLATES`, or else those of tokenizer_config.json.
    """
    files = {file.stem: file for file in (folder / hub.ADDITIONAL_TEMPLATES).glob("*.jinja")}
    if (folder / TEMPLATE_FILE).is_file():
        files[_DEFAULT_TEMPLATE] = folder / TEMPLATE_FILE
    named: dict[str, Any] = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if not named:
        found = _json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):  # several templates with names
            named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        else:
            named = found if isinstance(found, dict) else {_DEFAULT_TEMPLATE: found}
    return {name: named[name] for name in (_DEFAULT_TEMPLATE, _TOOL_TEMPLATE) if isinstance(named.get(name), str)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokenizer and the chat template of one model folder."""

    sha256: bytes
    """Result of `tokenizer_sha256` for the folder."""
    stop_token_ids: tuple[int, ...]
    """End-of-sequence ids of generation_config.json, config.json and tokenizer_config.json, ascending."""
    vocabulary_size: int
    """Token ids are below this: the vocabulary of the model, or of the tokenizer if config.json gives none."""
    _folder: Path
    _tokenizer: tokenizers.Tokenizer
    _templates: Mapping[str, tuple[jinja2.Template, CallForm]]  # by name
    _special: Mapping[str, str]
    _token_bytes: TokenBytes | None  # of byte-level tokenizers
    _added: Mapping[int, str]  # texts of the added tokens: special tokens, and others that are never split
    _control: re.Pattern[str] | None  # finds the texts of special tokens

    @staticmethod
    def load(source: str | Path, *, date: str = "") -> Tokenizer:
        """Read the tokenizer and the chat template of a model.

        Args:
            source: model folder, "hf:OWNER/NAME", "run:NAME" or "builtin:NAME", as a recipe's `model.source`.
            date: that the chat template writes, as a recipe's `data.date`; empty: that of each rendering.

        Raises:
            ConfigError: tokenizer.json is missing or damaged, or the chat template is not a Jinja template.
        """
        import tokenizers
        from tokenizers.decoders import ByteLevel

        from fourfold.model.token_bytes import TokenBytes

        is_name = isinstance(source, str) and source.startswith((BUILTIN_PREFIX, hub.PREFIX, runs.PREFIX))
        folder = resolve(str(source)) if is_name else Path(source)
        data = _bytes(folder / "tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises no narrower type
            raise ConfigError(f"{folder / 'tokenizer.json'}: `tokenizers` cannot read it: {error}") from None
        # tokenizer.json may switch both on, and both would change the ids.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special = special_tokens(folder)
        added = tokenizer.get_added_tokens_decoder()
        templates = _used_templates(folder)
        return Tokenizer(
            sha256=tokenizer_sha256(folder),
            stop_token_ids=_stop_token_ids(folder, tokenizer, special),
            vocabulary_size=_vocabulary_size(folder, tokenizer),
            _folder=folder,
            _tokenizer=tokenizer,
            _templates={name: _compile(text, folder, date, special) for name, text in templates.items()},
            _special=special,
            _token_bytes=TokenBytes(tokenizer) if isinstance(tokenizer.decoder, ByteLevel) else None,
            _added={token_id: token.content for token_id, token in added.items()},
            _control=_control_pattern([t.content for t in added.values() if _is_control(t)]),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` is possible."""
        return _DEFAULT_TEMPLATE in self._templates

    @property
    def begin_token_id(self) -> int | None:
        """Id of the token that begins a text, from tokenizer_config.json; None if there is none."""
        return self._special_id("bos_token")

    @property
    def end_token_id(self) -> int | None:
        """Id of the token that ends a text: `eos_token`, else the first of `stop_token_ids`; None if there is none."""
        token_id = self._special_id("eos_token")
        return next(iter(self.stop_token_ids), None) if token_id is None else token_id

    def _special_id(self, name: str) -> int | None:
        text = self._special.get(name)
        token_id: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return token_id

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the messages as the text of the model, up to the beginning of the assistant's answer.

        Args:
            messages: with "role" and "content", and what else the template reads: "name", "tool_calls" (objects as in
                OpenAI's chat completions, with the arguments as an object), "tool_call_id", "reasoning_content".
            tools: functions, each {"type": "function", "function": {"name", "description", "parameters"}}.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: further ones that the template may read, such as "enable_thinking".

        Raises:
            ConfigError: the model has no chat template.
            InvalidInput: the template cannot render the messages.
        """
        return self._render(messages, tools, add_generation_prompt, variables)

    def render_marked(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the messages as `render_chat` without a generation prompt, and the spans that the template marks.

        Returns:
            The text, and begin and end (exclusive) in characters of each part between {% generation %} and
            {% endgeneration %}, in order, without empty ones. A template without such marks has no span.

        Raises:
            ConfigError: the model has no chat template.
            InvalidInput: the template cannot render the messages.
        """
        return _take_marks(self._render(messages, tools, False, {}, _MARKS))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        name = _TOOL_TEMPLATE if tools and _TOOL_TEMPLATE in self._templates else _DEFAULT_TEMPLATE
        if name not in self._templates:
            raise ConfigError(
                f"{self._folder}: this model has no chat template; set data.chat = false to use prompts without a "
                f"template, set data.chat_template to a Jinja file, or use an instruction-tuned model"
            )
        template, call_form = self._templates[name]
        values: dict[str, Any] = {
            **self._special,
            "messages": call_form.fit(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
            "documents": None,
        }
        if clash := variables.keys() & values:
            raise InvalidInput(f"the variables {sorted(clash)} of the chat template are not for the caller to set")
        try:
            return template.render({**variables, **values, **marks})
        except _render_errors() as error:
            roles = [m.get("role") for m in messages]
            raise InvalidInput(f"the chat template refuses messages with the roles {roles}: {error}") from None

    def escape(self, value: Any) -> Any:
        """Mark the texts of special tokens in messages or tools of others, so that `encode` does not convert them.

        Otherwise the text of a user or a tool could end its own message and begin another one, in any role. Escape the
        values, render them, and encode the result. Templates whose roles are plain text (such as "[INST]" of models
        without such a token) cannot be protected.

        Args:
            value: text, or a mapping or list with texts at any depth, also in keys.
        """
        if self._control is None:
            return value
        if isinstance(value, str):
            return self._control.sub(_mark, value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        """Return a rendered text without the marks of `escape`."""
        return text.replace(MARK, "")

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: rendered chat, or plain text. The text of a special token becomes its id, unless it is escaped.
            add_special: add the special tokens for plain text, such as a begin token. A rendered chat has them.
        """
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = False) -> list[list[int]]:
        """Return what `encode` returns for each text; on all cores. May be called in any thread.

        Other threads run meanwhile. The library's own `encode` would hold them up, for 20 s with 7 MiB of text.
        """
        whole = iter(
            self._tokenizer.encode_batch_fast(
                [text for text in texts if MARK not in text], add_special_tokens=add_special
            )
        )
        return [self._encode_marked(text, add_special) if MARK in text else next(whole).ids for text in texts]

    def _encode_marked(self, text: str, add_special: bool) -> list[int]:
        """Encode the parts between marks one by one, so that no special token spans a mark."""
        from tokenizers import Encoding

        parts = self._tokenizer.encode_batch_fast(text.split(MARK), add_special_tokens=False)
        ids: list[int] = self._tokenizer.post_process(Encoding.merge(parts, True), None, add_special).ids
        return ids

    def added_text(self, token_id: int) -> str | None:
        """Return the text of an added token, such as a stop token; None for tokens that text is split into."""
        return self._added.get(token_id)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, without ids without a token and, by default, without special tokens."""
        return str(self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, perhaps a part of a character; none for a special token.

        The tokens of a tokenizer without byte-level tokens have those of their text.
        """
        return self.decode([token_id]).encode() if self._token_bytes is None else self._token_bytes.of(token_id)

    def decode_batch(self, sequences: Sequence[Int32Array]) -> list[str]:
        """Return the text of each sequence, as `decode` does; int32 [n] each. May be called in any thread."""
        if self._token_bytes is None:
            return [self.decode(ids.tolist()) for ids in sequences]
        return [self._token_bytes.decode(ids) for ids in sequences]


def _render_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that rendering may raise: templates and messages come from outside."""
    import jinja2

    return jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError


def _try_render(template: jinja2.Template, special: Mapping[str, str], messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages=messages, add_generation_prompt=False, tools=None, documents=None, **special)
    except _render_errors():
        return None


def _compile(source: str, where: Path | str, date: str, special: Mapping[str, str]) -> tuple[jinja2.Template, CallForm]:
    """Compile a template, and find the form in which it reads tool calls.

    It runs in a sandbox, because a model folder is data and must not run code.
    """
    import jinja2
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    fixed = datetime.datetime.fromisoformat(date) if date else None
    environment.globals["strftime_now"] = lambda pattern: (fixed or datetime.datetime.now()).strftime(pattern)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"{where}{line}: the chat template is not a Jinja template: {error.message}") from None
    return template, find_call_form(partial(_try_render, template, special))


def _generation_tag() -> type[jinja2.ext.Extension]:
    """Return an extension for {% generation %}, which marks the assistant's part.

    The marks are variables, so that the rendering without them stays as it is, and so that they stay around the text
    when a template assigns or joins it. (Positions in the output, as transformers records them, would be lost then.)
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - the base class asks for an attribute

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.Name(name, "load")]) for name in _MARKS)
            return [begin, *parser.parse_statements(("name:endgeneration",), drop_needle=True), end]

    return Generation


def _take_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without the marks of {% generation %}, and what they enclosed; of nested marks, the outermost."""
    parts, spans = list[str](), list[tuple[int, int]]()
    length = depth = begin = 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            begin = begin if depth else length
            depth += 1
        elif part == _END:
            depth -= 1
            if not depth and length > begin:
                spans.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Return whether a chat template may use an added token for the structure of messages.

    Some models do not declare their role tokens special, but write them like special tokens. Other added tokens, such
    as "<think>" or runs of spaces, are also a part of ordinary messages.
    """
    return bool(token.special) or token.content.startswith(("<|", "<\uff5c"))


def _control_pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    # Tokens of one character have no second one to mark; none is known to be special.
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _mark(match: re.Match[str]) -> str:
    text = match.group()
    return text[0] + MARK + text[1:]


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the named special tokens, such as "eos_token" and "image_token".

    They are in tokenizer_config.json, also as the object `extra_special_tokens`. If that file does not list the added
    tokens, as in older models, special_tokens_map.json comes first.
    """
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _json(folder / "special_tokens_map.json")
    named: list[tuple[str, Any]] = [(name, value) for name, value in config.items() if name.endswith("_token")]
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        extra = config.get(key)
        named += extra.items() if isinstance(extra, dict) else []
    # An object is an AddedToken as JSON.
    texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in named)
    return {name: text for name, text in texts if isinstance(text, str)}


def _stop_token_ids(folder: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]) -> tuple[int, ...]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    if "eos_token" in special:
        token_id = tokenizer.token_to_id(special["eos_token"])
        found.update([] if token_id is None else [token_id])
    return tuple(sorted(found))


def _vocabulary_size(folder: Path, tokenizer: tokenizers.Tokenizer) -> int:
    config = _json(folder / "config.json")
    text_config = config.get("text_config")  # the language part of a multimodal model
    for table in (config, text_config if isinstance(text_config, dict) else {}):
        if isinstance(table.get("vocab_size"), int):
            return int(table["vocab_size"])
    return int(tokenizer.get_vocab_size(with_added_tokens=True))


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); copy or save the model again") from None
    return value if isinstance(value, dict) else {}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read it ({error.strerror}); the model needs a fast tokenizer, which `save_pretrained` "
            f"writes as tokenizer.json"
        ) from None

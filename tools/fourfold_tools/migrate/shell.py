"""Reads the training command of a shell script. Nothing is executed.

Understood are quotes, comments, line continuations, variables and arrays of the script, `${NAME:-default}`, integer
arithmetic, here-documents, and commands inside of quotes, as in `srun bash -c "... python3 -m MODULE --flag 1"`. What
only a shell could tell (command substitutions, variables that the script does not set) becomes a placeholder `<NAME>`.
Branches whose condition does not hold are left out. Where that is unknown, variables keep their values of before.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fourfold.errors import ConfigError
from fourfold.text import clean
from fourfold_tools.migrate.conditions import KEYWORDS, LOOPS, Block, both, command_status, either, invert, matches

MAX_SCRIPT: Final = 1 << 20
_MAX_WORD: Final = 1 << 16
_MAX_WORDS: Final = 1 << 16
_MAX_DEPTH: Final = 8
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_EXPANSION: Final = re.compile(r"(\d+|[A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_BEFORE_COMMANDS: Final = frozenset(
    ("!", "time", "export", "local", "readonly", "declare", "typeset", "env", "nohup", "exec", "command")
)
_SETTERS: Final = ("let", "read", "unset", "mapfile", "readarray", "getopts")
_PRINTERS: Final = ("echo", "printf")
_SEPARATOR: Final = re.compile(r"&&|\|\||;;&?|;&|[\n;&|()]")
_ARITHMETIC: Final = re.compile(r"\(\(([^()]*)\)\)")
_ARITHMETIC_SET: Final = re.compile(r"\+\+|--|[^=!<>]=[^=]")
_OPERATORS: Final[Mapping[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(slots=True)
class Script:
    """The training command of a script."""

    words: list[str]
    """Words after the program."""
    before: list[str]
    """Words before it in the same command, as `torchrun --nproc_per_node 8`."""
    placeholders: dict[str, str]
    """Reason of each placeholder `<NAME>`, by its name."""
    notes: list[str] = field(default_factory=list)
    """Points that the user has to check."""
    found: bool = True
    """False: no command runs the program, and `words` are all words of the text."""
    program: str = ""
    """The word that names the program."""


def read_command(
    text: str, programs: re.Pattern[str], *, path: str, variables: Mapping[str, str], environment: Mapping[str, str]
) -> Script:
    """Return the first command of a script that runs a program.

    Args:
        text: the script, or only the flags of a command.
        programs: matches the end of the word that names the program, as `openrlhf.cli.train_ppo_ray`.
        path: name of the script in errors.
        variables: values that replace those of the script, by name.
        environment: values of variables that the script does not set.

    Raises:
        ConfigError: the script is malformed or too large.
    """
    if len(text) > MAX_SCRIPT:
        raise ConfigError(
            f"{path}: {len(text):,} characters are too many for a script (at most {MAX_SCRIPT:,}); give the script "
            f"that starts the training"
        )
    reader = _Reader(text, path, variables, environment)
    commands = reader.read()
    runs = [words for words in commands if words[0] not in _PRINTERS]
    inner = [reader.nested(body) for body in reader.bodies if _mentions(programs, body)]
    found = _training_commands(runs, programs, reader)
    if not found:  # a script that writes the command, or gives it to a shell: `sbatch <<EOF`
        found = [script for body in inner for script in _training_commands(body.read(), programs, body)]
        found += _training_commands(commands, programs, reader)
    if not found:
        return Script([word for words in commands for word in words], [], reader.placeholders, found=False)
    # `conda activate grpo`, and a text with the word sft, train nothing.
    found = [script for script in found if any(w.startswith("--") or "=" in w for w in script.words)] or found
    script = found[0]
    if len(found) > 1:
        script.notes.append(f"{path} has {len(found)} training commands; this is the first")
    for name in sorted(reader.conditional & reader.used):
        script.notes.append(
            f"{path} sets {name} inside of a condition or loop, or by a command, which is not evaluated; this value is "
            f"used: {clean(f'{name}={reader.text_of(name)}', 120)}"
        )
    return script


def _mentions(programs: re.Pattern[str], text: str) -> bool:
    """Return whether a text with several words may have one that names the program."""
    return re.search(programs.pattern.rstrip("$").replace("^", r"\b"), text) is not None


def _training_commands(commands: list[list[str]], programs: re.Pattern[str], reader: _Reader) -> list[Script]:
    return [script for words in commands if (script := _training_command(words, programs, reader))]


def _training_command(words: list[str], programs: re.Pattern[str], reader: _Reader, depth: int = 0) -> Script | None:
    for index, word in enumerate(words):
        if programs.search(word) and not any(c.isspace() for c in word):
            return Script(words[index + 1 :], words[:index], reader.placeholders, program=word)
        if depth < _MAX_DEPTH and any(c.isspace() for c in word) and _mentions(programs, word):
            inner = reader.nested(word)
            for command in inner.read():
                if script := _training_command(command, programs, inner, depth + 1):
                    return script
    return None


class _Reader:
    """Reads a script from its start to its end, and follows its assignments."""

    def __init__(self, text: str, path: str, fixed: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._path = path
        self._fixed = fixed
        self._environment = environment
        self._values: dict[str, list[str]] = {}
        self._heredocs: list[tuple[str, str]] = []
        self._blocks: list[Block] = []
        self._loops = 0  # among the blocks
        self._status: bool | None = True  # of the last command
        self._linked: bool | None = True  # whether && and || let the next command run
        self._assigned = False  # whether the command has an assignment
        self._guessed: set[str] = set()  # variables with a value that is set under an unknown condition alone
        self.placeholders: dict[str, str] = {}
        self.bodies: list[str] = []
        """Here-documents that are not read into a variable."""
        self.conditional: set[str] = set()
        self.used: set[str] = set()

    def nested(self, text: str) -> _Reader:
        """Return a reader of a command inside of quotes, with the same variables."""
        inner = _Reader(text, self._path, self._fixed, self._environment)
        inner._values, inner.placeholders = self._values, self.placeholders
        inner.conditional, inner.used = self.conditional, self.used
        return inner

    def text_of(self, name: str) -> str:
        """Return the value of a variable."""
        return " ".join(self._values.get(name, []))

    def read(self) -> list[list[str]]:
        """Return the words of all commands, without those that do not run."""
        commands: list[list[str]] = []
        words: list[str] = []
        opening, total, text = True, 0, self._text  # opening: the next word may be an assignment
        while self._at < len(text):
            self._step(" \t")
            if redirect := re.compile(r"(\d*[<>]|&>)[<>&|-]*").match(text, self._at):
                self._redirect(redirect, words[-1] if words[:1] == ["read"] and self._runs is not False else "")
            elif opening and (match := _ARITHMETIC.match(text, self._at)):
                self._at = match.end()
                words += ["((", self._arithmetic(match[1])]
                if _ARITHMETIC_SET.search(match[1]):
                    self._doubt(match[1])
            elif separator := _SEPARATOR.match(text, self._at):
                self._at = separator.end()
                if words and self._runs is not False:
                    commands.append(words)
                self._end_command(words, separator[0])
                words, opening = [], True
            elif opening and (match := _ASSIGNMENT.match(text, self._at)):
                self._assign(match)
            elif opening and text.startswith("[[", self._at):
                words += self._double_brackets()
            else:
                found = self._word()
                if opening and found and found[0] in KEYWORDS:
                    self._keyword(found.pop(0))
                else:
                    opening = opening and bool(found) and (found[0] in _BEFORE_COMMANDS or found[0].startswith("-"))
                words += found
                total += len(found)
                if total > _MAX_WORDS:
                    raise ConfigError(f"{self._path}: more than {_MAX_WORDS:,} words; give the script itself")
        return commands + ([words] if words and self._runs is not False else [])

    def _end_command(self, words: list[str], separator: str) -> None:
        """Track the status of a command, and its effect on the next one."""
        if words and words[0] in _SETTERS:
            self._doubt(" ".join(words))
        if words or self._assigned:
            own = command_status(words)
            if self._linked is not False:
                self._status = own if self._linked or own == self._status else None
            self._linked = {"&&": self._status, "||": invert(self._status)}.get(separator, True)
        self._assigned = False
        if separator == "\n":
            self._skip_heredocs()
        elif separator in (";;", ";&", ";;&") and self._blocks:
            self._patterns(self._blocks[-1])

    def _keyword(self, word: str) -> None:
        """Open, advance or close a block."""
        if word in ("if", "for", "while", "until", "{"):
            self._blocks.append(Block(word, self._runs))
            self._loops += word in LOOPS
        elif word == "case":
            self._step(" \t\n")
            self._blocks.append(Block(word, self._runs, subject=" ".join(self._word())))
            self._step(" \t\n")
            self._word()  # in
            self._patterns(self._blocks[-1])
        elif self._blocks and word in ("fi", "done", "esac", "}"):
            self._loops -= self._blocks.pop().keyword in LOOPS
        elif self._blocks:
            self._blocks[-1].advance(word, self._status)

    def _patterns(self, block: Block) -> None:
        """Step over the patterns of a branch of `case`, and decide whether it runs."""
        block.runs = True
        self._step(" \t\n(")
        if re.compile(r"esac\b").match(self._text, self._at):
            return
        holds: bool | None = False
        while self._at < len(self._text) and self._text[self._at] not in ";&<>)":
            holds = either(holds, matches(block.subject, " ".join(self._word())))
            self._step(" \t\n|(")
        self._at += 1
        block.take(holds)

    def _double_brackets(self) -> list[str]:
        """Return the words of a test `[[ ... ]]`, in which some separators have another meaning."""
        words: list[str] = []
        while self._at < len(self._text) and words[-1:] != ["]]"]:
            mark = re.compile(r"&&|\|\||[&|;<>()]").match(self._text, self._at)
            words.append(mark[0] if mark else " ".join(self._word()))
            self._at = mark.end() if mark else self._at
            self._step(" \t\n")
        return words

    @property
    def _runs(self) -> bool | None:
        """Whether the commands that are read now run; None: unknown."""
        inner = self._blocks[-1:]
        return both(self._linked, both(inner[0].outer, inner[0].runs) if inner else True)

    def _step(self, characters: str) -> None:
        """Step over characters, line continuations and comments."""
        while self._at < len(self._text):
            if self._text[self._at] in characters:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] == "#":
                self._skip_line()
            else:
                return

    def _skip_line(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _redirect(self, match: re.Match[str], read_into: str) -> None:
        """Step over a redirection; a here-document may be read into a variable."""
        self._at = match.end()
        if "&" in match[0][1:] and self._text[self._at : self._at + 1].isdecimal():  # 2>&1
            self._at += 1
            return
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        if self._at < len(self._text) and self._text[self._at] not in "\n;&|()<>":
            target = self._word()
            if match[0].lstrip("0123456789").startswith("<<") and not match[0].endswith("<<<"):
                self._heredocs += [(mark, read_into) for mark in target[:1]]

    def _skip_heredocs(self) -> None:
        for mark, name in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(mark)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
            body = self._text[self._at : end.start() if end else len(self._text)]
            self._at = min(end.end() + 1, len(self._text)) if end else len(self._text)
            if not name:
                self.bodies.append(body)
            elif name not in self._fixed and len(body) <= _MAX_WORD:
                self.conditional.discard(name)
                self._values[name] = self.nested('"' + body.replace('"', '\\"') + '"')._word()
        self._heredocs = []

    def _assign(self, match: re.Match[str]) -> None:
        name, more = match[1], bool(match[2])
        self._at, self._assigned = match.end(), True
        array = self._text.startswith("(", self._at)
        if array:
            self._at += 1
            value = self._array()
        else:
            value = [" ".join(self._word(assigned=name))]
        if name in self._fixed or self._runs is False:
            return
        before = self._values.get(name, [])
        if more:
            value = before + value if array else ["".join(before[:1]) + value[0], *before[1:]]
        self._check_size(sum(map(len, value)))
        runs = self._runs
        if (runs is None or self._loops) and value != before:
            self.conditional.add(name)
        elif not re.search(rf"\$\{{?{name}\b", self._text[match.end() : self._at]):  # not made of its old value
            self.conditional.discard(name)
        if runs:
            self._guessed.discard(name)
        elif name not in self._values:
            self._guessed.add(name)
        elif name not in self._guessed:
            return
        self._values[name] = value

    def _doubt(self, text: str) -> None:
        """Name the variables of a text, which a command that is not evaluated may change."""
        if self._runs is not False:
            self.conditional.update(self._values.keys() & _NAME.findall(text))

    def _array(self) -> list[str]:
        words: list[str] = []
        between = " \t\n;&|<>("
        self._step(between)
        while self._at < len(self._text):
            if self._text[self._at] == ")":
                self._at += 1
                return words
            words += self._word()
            self._step(between)
        raise self._unclosed("(", self._at)

    def _word(self, *, assigned: str = "") -> list[str]:
        """Return the expanded words of the text up to the next separator; a single word in an assignment."""
        words, quoted = [""], False
        start = self._at
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\n;&|<>()":
                break
            self._at += 1
            match character:
                case "\\":
                    words[-1] += self._text[self._at : self._at + 1].replace("\n", "")
                    self._at += 1
                case "'":
                    quoted = True
                    words[-1] += self._until("'", start)
                case '"':
                    parts = self._double_quoted(assigned)
                    quoted = quoted or bool(parts)
                    words[-1] += parts[0] if parts else ""
                    words += parts[1:]
                case "$" if self._text.startswith("'", self._at):
                    quoted = True
                    words[-1] += self._dollar(assigned)[0]
                case "$" | "`":
                    parts = self._dollar(assigned) if character == "$" else [self._command("`", assigned)]
                    if not assigned:
                        parts = [word for part in parts for word in re.split(r"[ \t\n]+", part)]
                    words[-1] += parts[0] if parts else ""
                    words += parts[1:]
                case _:
                    words[-1] += character
            self._check_size(len(words[-1]))
        return words if quoted or assigned else [word for word in words if word]

    def _check_size(self, size: int) -> None:
        if size > _MAX_WORD:
            raise ConfigError(
                f"{self._path}: a value grows beyond {_MAX_WORD:,} characters; set the variables by --define NAME=VALUE"
            )

    def _until(self, end: str, start: int) -> str:
        at = self._text.find(end, self._at)
        if at < 0:
            raise self._unclosed(end, start)
        text = self._text[self._at : at]
        self._at = at + len(end)
        return text

    def _unclosed(self, mark: str, at: int) -> ConfigError:
        line = self._text.count("\n", 0, at) + 1
        return ConfigError(f"{self._path}:{line}: {mark} is opened and never closed; close it")

    def _double_quoted(self, assigned: str) -> list[str]:
        """Return the words of a text in quotes: one, or those of an array, of which there may be none."""
        words, start, parts = [""], self._at, [""]
        while self._at < len(self._text):
            character = self._text[self._at]
            self._at += 1
            if character == '"':
                return words if parts or words != [""] else []
            if character == "\\":
                following = self._text[self._at : self._at + 1]
                self._at += 1
                words[-1] += "" if following == "\n" else following if following in '"\\$`' else "\\" + following
            elif character in "$`":
                parts = self._dollar(assigned) if character == "$" else [self._command("`", assigned)]
                words[-1] += parts[0] if parts else ""
                words += parts[1:]
            else:
                words[-1] += character
            self._check_size(len(words[-1]))
        raise self._unclosed('"', start)

    def _dollar(self, assigned: str) -> list[str]:
        """Return the expansion of a `$`; several words only for an array."""
        text = self._text
        if text.startswith("((", self._at):
            self._at += 2
            return [self._arithmetic(self._balanced("(", ")", closing="))"))]
        following = text[self._at : self._at + 1]
        if following == "(":
            self._at += 1
            return [self._command("(", assigned)]
        if following == "{":
            self._at += 1
            return self._braces(self._balanced("{", "}", closing="}"))
        if following == "'":
            self._at += 1
            return [re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), self._until("'", self._at))]
        if following in ("@", "*"):
            self._at += 1
            if any(block.keyword == "{" for block in self._blocks):
                return self._placeholder("@", "stands for the arguments of a function").split()
            return self._values.get("@", [])
        if match := re.compile(r"\d|[A-Za-z_][A-Za-z0-9_]*").match(text, self._at):
            self._at = match.end()
            return self._value(match[0])[:1] or [""]
        if following in tuple("?!#$-"):
            self._at += 1
            return [self._placeholder(following, "is known to a running shell alone")]
        return ["$"]

    def _balanced(self, opening: str, closing_one: str, *, closing: str) -> str:
        """Return the text up to the end of a pair that is open, and step over it."""
        start, depth = self._at, 0
        while self._at < len(self._text):
            if depth == 0 and self._text.startswith(closing, self._at):
                text = self._text[start : self._at]
                self._at += len(closing)
                return text
            character = self._text[self._at]
            depth += (character == opening) - (character == closing_one)
            self._at += 2 if character == "\\" else 1
        raise self._unclosed(opening, start)

    def _command(self, opening: str, assigned: str) -> str:
        """Step over a command substitution, and return its placeholder."""
        text = self._until("`", self._at) if opening == "`" else self._balanced("(", ")", closing=")")
        if text.lstrip().startswith("#"):  # a comment between two lines of a command
            return ""
        first = _NAME.search(text)
        name = assigned or (first[0] if first else "command")
        return self._placeholder(name, f"is the output of $({text.strip()[:60]}), and no command is run")

    def _placeholder(self, name: str, reason: str) -> str:
        if name in self._fixed:
            return self._fixed[name]
        self.placeholders.setdefault(name, reason)
        return f"<{name}>"

    def _value(self, name: str) -> list[str]:
        self.used.add(name)
        if name in self._fixed:
            return [self._fixed[name]]
        if name in self._values:
            return self._values[name]
        if name == "0":
            return [self._path]
        if name in self._environment:
            return [self._environment[name]]
        return [self._placeholder(name, "is not set in the script")]

    def _braces(self, text: str) -> list[str]:
        match = _EXPANSION.fullmatch(text)
        if match is None:
            inside = _NAME.search(text)
            name = inside[0] if inside else "expression"
            return [self._placeholder(name, f"is ${{{text[:60]}}}, which is not evaluated")]
        name, array, mark, rest = match.groups()
        known = name in self._fixed or name in self._values or name in self._environment
        empty = known and not "".join(self._value(name))
        usable = known and not (empty and (mark or "").startswith(":"))
        if mark and mark[-1] == "+":
            return [self._inner(rest)] if usable else [""]
        if mark and mark[-1] in "-=" and not usable:
            value = self._inner(rest)
            if mark[-1] == "=" and self._runs is not False:
                self._values[name] = [value]
            self.used.add(name)
            return [value]
        values = self._value(name)
        return values if array else values[:1] or [""]

    def _inner(self, text: str) -> str:
        inner = self.nested(text)
        if len(text) > _MAX_WORD:
            raise self._unclosed("${", self._at)
        words = [" ".join(words) for words in inner.read()]
        return " ".join(words)

    def _arithmetic(self, text: str) -> str:
        names = {name: self._value(name)[0] for name in _NAME.findall(text)}
        if unknown := [name for name, value in names.items() if not re.fullmatch(r"-?\d{1,18}", value)]:
            return self._placeholder(unknown[0], f"is no whole number in $(({text.strip()[:60]}))")
        try:
            tree = ast.parse(text.replace("$", " ").replace("{", " ").replace("}", " ").strip(), mode="eval")
            return str(_evaluate(tree.body, {name: int(value) for name, value in names.items()}))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._placeholder("arithmetic", f"is $(({text.strip()[:60]})), which cannot be computed")


def _evaluate(node: ast.expr, names: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names)
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op) in _OPERATORS:
            value = int(_OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names)))
            if abs(value) < 1 << 63:
                return value
    raise ValueError("no integer arithmetic")

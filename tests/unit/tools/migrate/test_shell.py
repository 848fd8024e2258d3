"""Reading a script without running it: quotes, variables, and hostile text."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold_tools.migrate.shell import Script, read_command

PROGRAM = re.compile(r"(^|\.)train$")


def read(text: str, **variables: str) -> Script:
    return read_command(text, PROGRAM, path="script.sh", variables=variables, environment={"FROM_ENV": "e"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python -m a.train --x 1 \\\n  --y 2\n--z 3", ["--x", "1", "--y", "2"]),
        ("train --x 'a b' \"c $d\" # --z", ["--x", "a b", "c <d>"]),
        ("N=3\nexport M=${N}4\ntrain $N ${M} \"$N-$M\"", ["3", "34", "3-34"]),
        ("train ${A:-x y} ${B:-'p q'} ${FROM_ENV:-z} ${C-}", ["x", "y", "p", "q", "e"]),
        ("A=(--x 1 # no\n --y\n)\nB=$(ls)\ntrain ${A[@]} \"${A[@]}\"", ["--x", "1", "--y", "--x", "1", "--y"]),
        ("F='--a 1'\nF+=' --b 2'\ntrain $F", ["--a", "1", "--b", "2"]),
        ("K=$((1024 * (2 + 1)))\ntrain $K $((K / 2))", ["3072", "1536"]),
        ("train a > log 2>&1 b &>> x | tee log", ["a", "b"]),
        ("srun bash -c \"cd /x && ray job submit -- a.train --x \\\"y\\\" \\\n -z\" &> log", ["--x", "y", "-z"]),
        ("read -r -d '' CMD <<EOF\na.train --x 1 \\\n --y z\nEOF\ndeepspeed --module $CMD", ["--x", "1", "--y", "z"]),
        ("cat <<EOF\ntrain --no\nEOF\ntrain --yes", ["--yes"]),
        ("train $'a\\nb' $@ \"$1\"", ["a\nb", "<1>"]),
        ("if true; then X=1; fi\ntrain $X", ["1"]),
        ("X=1 train --x=$X", ["--x=1"]),
        ("train --x\r\n", ["--x"]),
        ('E=()\ntrain "${E[@]}" a "x${E[@]}" ""', ["a", "x", ""]),
        ('A=()\nA+=(x=1)\nA+=("y=2 3")\nA+=z\ntrain "${A[@]}"', ["x=1z", "y=2 3"]),
        ('run() {\n train x=1 "$@"\n}\nrun y=2', ["x=1", "<@>"]),
        ('echo "train x=0"\ntrain x=1 `# why` y=2', ["x=1", "y=2"]),
        ("G=8\nsbatch <<EOF\n#SBATCH -n 1\nsrun train x=$G \\\n  y=2\nEOF", ["x=8", "y=2"]),
        ("cat <<EOF\nit's no shell\nEOF\nbash -c 'train x=1'", ["x=1"]),
    ],
)  # fmt: skip
def test_the_words_are_those_of_a_shell(text: str, words: list[str]) -> None:
    assert read(text).words == words


def test_what_only_a_shell_knows_is_a_placeholder_with_its_reason() -> None:
    script = read('D=$(cd "$(dirname "$0")" && pwd)\nE=`date`\ntrain $D/x $E $HOME/y ${X%/*}')
    assert script.words == ["<D>/x", "<E>", "<HOME>/y", "<X>"]
    assert "no command is run" in script.placeholders["D"]
    assert script.placeholders["HOME"] == "is not set in the script"
    assert read("D=$(pwd)\nN=1\ntrain $D $N $HOME", D="/d", N="2", HOME="/h").words == ["/d", "2", "/h"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("D=${D:-gpu}\nN=8\ncase \"${D}\" in\n gpu)\n G=8\n ;;\n npu)\n G=16\n N=16\n ;;\nesac\ntrain $N $G", "8 8"),
        ("A=1\n[ $A = 1 ] || { N=2; M=4; }\n[ $A = 1 ] && {\n  if [ a = b ]; then N=7; fi\n N=3\n}\ntrain $N", "3"),
        ("D=b\ncase $D in # first\n a|c) N=1;;\n (b|d)\n N=2;; *) N=3;; esac\ntrain $N", "2"),
        ("D=x1\ncase $D in y*) train y;; x[0-9]) train x;; *) train z;; esac", "x"),
        ("D=gpu\nif [ $D = npu ]; then\n train --npu\nelif [ $D = gpu ]\nthen train --gpu\nelse train\nfi", "--gpu"),
        ("A=b\nif [[ $A == b* && -n \"$A\" ]]; then N=1; else N=2; fi\ntrain $N", "1"),
        ("A=8\nif (( A > 8 )); then N=1; elif [ $A -eq 8 ]; then N=3; else N=2; fi\ntrain $N", "3"),
        ("A=1\n[ $A = 1 ] && N=2\n[ $A = 2 ] && N=3\n[ $A = 2 ] || M=4\ntrain $N $M", "2 4"),
        ("if [ -z \"${KEY:-}\" ]; then L=console; else L=wandb; fi\ntrain $L", "console"),
        ("if ! false; then if [ a = b ]; then N=1; else N=2; fi; fi\ntrain $N", "2"),
        ("case $1 in @(a|b)) N=1;; esac\ntrain x", "x"),
        ("while [ 1 -gt 2 ]; do N=1; done\ntrain ${N:-0}", "0"),
        ("export N=1 && M=2 || M=3\ntrain $N $M", "1 2"),
        ("N=1\nif [ a = b ]; then read -d '' N <<EOF\n2\nEOF\nfi\ntrain $N", "1"),
    ],
)  # fmt: skip
def test_a_branch_that_does_not_run_is_left_out(text: str, words: str) -> None:
    script = read(text)
    assert (" ".join(script.words), script.notes) == (words, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N=1\nif [ $A = b ]; then\n  N=2\nfi\ntrain $N", "1"),
        ("N=1\ncase $A in a) N=2;; *) N=3;; esac\ntrain $N", "1"),
        ("N=1\n[ -f /x ] && N=2 || N=3\ntrain $N", "1"),
        ("N=1\nwhile [[ $# -gt 0 ]]; do\n case $1 in\n --n) N=$2; shift 2;;\n *) shift;; esac\ndone\ntrain $N", "1"),
        ("N=(a b)\nif [ -f x ]; then N+=(c); fi\ntrain ${N[@]}", "a b"),
        ("if [ -f x ]; then N=1; else N=2; fi\ntrain $N", "2"),
        ("N=1\nwhile [ $N -lt 3 ]; do N=$((N + 1)); done\ntrain $N", "2"),
        ("N=1\nuntil [ $N -ge 3 ]; do ((N++)); done\ntrain $N", "1"),
        ("while [ $# -gt 0 ]; do case $1 in --n) N=$2;; esac; done\nN=${N:-4}\ntrain $N", "<2>"),
        ("if [ -f x ]; then N=1; fi\ntrain ${M:-$N}", "1"),
        ("N=1\nread N < file\ntrain $N", "1"),
        ("N=1\nunset N\ntrain ${N:-2}", "1"),
    ],
)
def test_under_an_unknown_condition_a_value_of_before_is_kept_and_named(text: str, words: str) -> None:
    script = read(text)
    assert " ".join(script.words) == words
    assert script.notes == [
        f"script.sh sets N inside of a condition or loop, or by a command, which is not evaluated; this value is "
        f"used: N={words}"
    ]


def test_a_second_command_is_named() -> None:
    script = read("train --x 1\ntrain --x 2")
    assert script.words == ["--x", "1"]
    assert any("2 training commands" in note for note in script.notes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x\ntrain 'abc", "script.sh:2: ' is opened and never closed"),
        ('train "abc', '" is opened and never closed'),
        ("train $(abc", "( is opened and never closed"),
        ("train ${abc", "{ is opened and never closed"),
        ("A=(a b\ntrain", "( is opened and never closed"),
        ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 40 + "train $A", "grows beyond"),
        ("x" * (2 << 20), "too many for a script"),
        ("train" + " x" * (1 << 17), "more than"),
        ("if x; then " * ((1 << 16) + 1), "more than"),
    ],
)
def test_hostile_text_is_refused_soon(text: str, error: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match=re.escape(error)):
        read(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text", ["{ " * 100_000 + "A=1;" * 100_000, "[ $X ] && { " + "".join(f"A{i}=1;" for i in range(90_000))]
)
def test_open_blocks_and_many_variables_take_no_long_time(text: str) -> None:
    began = time.process_time()
    read(text)
    assert time.process_time() - began < 10


def test_nothing_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    touched = tmp_path / "touched"
    attack = f"touch {touched}"
    script = tmp_path / "script.sh"
    script.write_text(
        f"$({attack})\nA=`{attack}`\nB=$({attack})\n{attack}\neval '{attack}'\n"
        f"C=$((__import__('os').system('{attack}')))\n"
        f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path M --data.prompt_dataset $A$B$C$({attack}) "
        f"--reward.remote_url r.py --vllm.num_engines 1\n"
    )
    assert cli_main.main(["import", "openrlhf", str(script)]) == 0
    assert not touched.exists()
    assert "<A>: A is the output of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\xff\xfe\x00", "not UTF-8 (byte 0)"),
        (b"train\x00", "has a zero byte"),
        (b"x" * (2 << 20), "too many for a configuration"),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    content: bytes, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.sh").write_bytes(content)
    for system in ("openrlhf", "trl", "verl"):
        assert cli_main.main(["import", system, str(tmp_path / "script.sh")]) == 1
        assert error in capsys.readouterr().err
    assert cli_main.main(["import", "trl", str(tmp_path / "absent")]) == 1
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err
    assert cli_main.main(["import", "trl", str(tmp_path)]) == 1
    assert "cannot be read" in capsys.readouterr().err

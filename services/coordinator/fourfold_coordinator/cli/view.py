"""`fourfold view [RUN|HOST:PORT...]`: shows runs in a browser, in progress or ended. It writes nothing to them."""

from __future__ import annotations

import argparse
import importlib.util
import re
import secrets
import shlex
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fourfold.cli.numbers import number
from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.rpc.channel import is_loopback, join_target, split_target

from ..launch.run_folder import find_run

if TYPE_CHECKING:
    from ..view.reader import RunFolders  # imported late: `main` first checks that its packages are installed

_ROOT: Final = Path("runs")
_PORT: Final = 8440
_TOKEN_BYTES: Final = 24
_MIN_TOKEN: Final = 16
_CERTS_CONTENT: Final = "viewer-0.pem, or with --run-token-file only ca.pem"
_PACKAGES: Final = ("starlette", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN|HOST:PORT",
        help="folders of runs, and addresses of coordinators on other machines; default: all in runs/",
    )
    parser.add_argument(
        "--certs",
        default="",
        metavar="DIR",
        help=f"for HOST:PORT: folder of `fourfold certs` with {_CERTS_CONTENT}",
    )
    parser.add_argument(
        "--run-token-file", type=Path, metavar="FILE", help="for HOST:PORT: a token with the scope view, in a file"
    )
    parser.add_argument(
        "--copy-limit",
        type=number,
        metavar="GIB",
        help="for HOST:PORT: limit of all copies of such runs, with their indexes; default 32",
    )
    parser.add_argument("--listen", default=f"127.0.0.1:{_PORT}", metavar="HOST:PORT", help="port 0: any free port")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the token that browsers need, in a file; for other machines"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate (PEM), to serve https")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")


def main(args: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"`view` needs {' and '.join(missing)}; {install_command('fourfold-coordinator[view]')}")
    host, port = split_target(args.listen)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both or none")
    if args.tls_cert is None and not is_loopback(host):
        raise ConfigError(
            f"--listen {args.listen} is beyond loopback, where pages and token would travel without encryption; add "
            f"--tls-cert and --tls-key, or listen on 127.0.0.1 and use ssh -L {port or _PORT}:127.0.0.1:{port or _PORT}"
        )
    token = _read_token(args.token_file, "--token-file") if args.token_file else ""
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(_TOKEN_BYTES)
    _check_remote(args)
    with ExitStack() as opened:
        _serve(args, _open_runs(args, opened), host, port, token)
    return 0


def _open_runs(args: argparse.Namespace, opened: ExitStack) -> RunFolders:
    """Return the runs of the command line; runs of other machines are open until `opened` is closed."""
    from ..view.reader import REMOTE, RunFolders, cache_folder
    from ..view.remote import COPY_GIB, CopyRoom, open_remote

    room = CopyRoom(cache_folder() / REMOTE, args.copy_limit or COPY_GIB)
    token = _read_token(args.run_token_file, "--run-token-file") if args.run_token_file else ""
    runs = [
        opened.enter_context(open_remote(run, certs=args.certs, token=token, room=room))
        if _is_address(run)
        else find_run(Path(run))
        for run in args.runs
    ]
    folders = RunFolders(runs, root=None if runs else _ROOT)
    if not args.runs and not folders.all():
        raise ConfigError(f"{_ROOT}/: no runs are here; start one (fourfold run RECIPE.toml), or give folders of runs")
    return folders


def _serve(args: argparse.Namespace, runs: RunFolders, host: str, port: int, token: str) -> None:
    import uvicorn

    from fourfold.algorithm.registry import refuse_files

    from ..view.app import make_app

    refuse_files()  # folders and hosts of others have recipes, too
    config = uvicorn.Config(
        make_app(runs, token=token),
        log_level="warning",
        server_header=False,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
        timeout_graceful_shutdown=1,
    )
    try:
        config.load()
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"--tls-cert {args.tls_cert} with --tls-key {args.tls_key}: they cannot be used ({error}); give a "
            f"certificate and its private key, both in PEM"
        ) from None
    with _listen(host, port) as listener:
        scheme, place = "https" if args.tls_cert else "http", join_target(host, listener.getsockname()[1])
        # Flushed: the reader may be a program.
        print(f"runs: {scheme}://{place}/{f'?token={token}' if token else ''}   (Ctrl-C ends)", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def _check_remote(args: argparse.Namespace) -> None:
    """Raise ConfigError for options of remote runs that do not fit the runs."""
    remote = [run for run in args.runs if _is_address(run)]
    if args.copy_limit is not None and not args.copy_limit > 0:
        raise ConfigError(f"--copy-limit {args.copy_limit:g}: a limit in GiB is above 0; raise it, or leave it out")
    for flag, value in (
        ("--certs", args.certs),
        ("--run-token-file", args.run_token_file),
        ("--copy-limit", args.copy_limit),
    ):
        if value and not remote:
            raise ConfigError(f"{flag} {value} is for runs of other machines; add HOST:PORT of one, or remove {flag}")
    for run in remote:
        if not args.certs and not is_loopback(split_target(run)[0]):
            raise ConfigError(f"{run} is another machine, which needs TLS; add --certs DIR with {_CERTS_CONTENT}")


def _is_address(run: str) -> bool:
    return re.fullmatch(r"\S+:\d+", run) is not None and not Path(run).is_dir()


def _read_token(path: Path, flag: str) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path}: it cannot be read ({error}); write one line of ASCII to it") from None
    if len(token) < _MIN_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        command = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        if flag == "--run-token-file":  # the coordinator must know the token
            command = f"fourfold certs token add DIR NAME --scope view > {shlex.quote(str(path))}"
        raise ConfigError(
            f"{flag} {path}: a token has {_MIN_TOKEN} or more of A-Z a-z 0-9 - _; make one with: {command}"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # listen first: a browser that connects early waits
    except OSError as error:
        listener.close()
        raise ConfigError(f"--listen {host}:{port}: {error.strerror or error}; choose another port, or 0") from None
    return listener

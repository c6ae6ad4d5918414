"""`commsweep dashboard`: optuna-dashboard on a search or on a sweep, no account, nothing leaves the
machine.
"""

from __future__ import annotations

import argparse
import signal
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from commsweep.cli.options import name, whole_number
from commsweep.errors import UserError, nearest
from commsweep.store import Store


def add_commands(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:
    """Register this file's subcommand."""
    parser = commands.add_parser(
        "dashboard",
        parents=[shared],
        help="open a search or a sweep in optuna-dashboard",
        description=(
            "Serve optuna-dashboard on a study of the store. A sweep is shown as a study made "
            "from its finished runs: quality against bytes, parallel coordinates, importance of "
            "settings."
        ),
    )
    parser.add_argument(
        "name", help="a study (commsweep search) or a sweep (commsweep sweep launch) of this store"
    )
    parser.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=8080,
        help="0: any that is free (default: 8080)",
    )
    parser.add_argument(
        "--host",
        type=name,
        default="127.0.0.1",
        help="address to listen on (default: this machine only)",
    )
    parser.set_defaults(command=_dashboard)


def _dashboard(args: argparse.Namespace) -> int:
    store = Store(args.store)
    sweeps = {path.stem for path in (store.root / "sweeps").glob("*.json")}
    studies = {path.stem for path in (store.root / "studies").glob("[!.]*.journal")}
    names = sorted(sweeps | studies)
    if args.name not in names:
        raise UserError(
            f"'{args.name}' is neither a study nor a sweep of store '{store.root}'"
            f"{nearest(args.name, names)} (it has: {', '.join(names) or 'none'})"
        )
    if args.name in sweeps:
        from commsweep.launching.views.optuna import mirror

        mirror(args.name, store)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna_dashboard import wsgi

    journal = store.root / "studies" / f"{args.name}.journal"
    app = wsgi(JournalStorage(JournalFileBackend(str(journal))))
    try:
        server = make_server(args.host, args.port, app, server_class=_Server, handler_class=_Quiet)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {args.host} --port {args.port}: "
            f"{getattr(error, 'strerror', None) or error}; choose another with --port"
        ) from None
    print(
        f"dashboard of {args.name}: http://{args.host}:{server.server_port}/  (Ctrl-C ends it)",
        flush=True,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


class _Server(ThreadingMixIn, WSGIServer):
    """Answers while an earlier question is still being answered."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """No line for every request."""
